// A weight matrix [out, in], packed in panels of 32 outputs, in the order in which kernels read them.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#include "isa/blocks.h"
#include "isa/kernels.h"
#include "base/aligned_vector.h"
#include "base/thread_pool.h"

namespace paceline {

// From q4_k on: a file's own blocks, in the order of `kBlockForms`.
enum class WeightType { int8, int4_row, int4, bf16, f32, q4_k, q5_k, q6_k, q3_k, iq4_xs, iq4_nl, mxfp4, q5_0, q8_0 };

constexpr bool is_blocks(WeightType type) { return type >= WeightType::q4_k; }
constexpr size_t form_of(WeightType type) { return static_cast<size_t>(type) - static_cast<size_t>(WeightType::q4_k); }

// True if weights are spread by `hadamard`, have one scale per output, and are multiplied with `SpreadRows`.
constexpr bool is_spread(WeightType type) { return type == WeightType::int8 || type == WeightType::int4_row; }

// True if matrices of two types read the same activations.
constexpr bool read_alike(WeightType a, WeightType b) { return a == b || (is_blocks(a) && is_blocks(b)); }

// Memory for packed weights, aligned to cache lines. Buffers are cut one after another from large chunks that the system may back
// with huge pages. A chunk is freed with its last buffer.
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t bytes, uint8_t fill = 0);
    // Bytes of a mapped file, which `owner` keeps. They are only read, and at least `kBytesBehind` must follow them.
    Buffer(std::shared_ptr<const void> owner, const uint8_t* at, size_t bytes);
    uint8_t* data() const { return data_.get(); }
    size_t size() const { return bytes_; }
    bool writable() const { return writable_; }

  private:
    std::shared_ptr<uint8_t> data_;
    size_t bytes_ = 0;
    bool writable_ = true;
};
constexpr size_t kAlignment = 64;                 // alignment of buffers
constexpr size_t kBytesBehind = size_t{1} << 13;  // kernels fetch a little beyond a matrix

// Token rows in the form that matrices of one type and width read.
class Activations {
  public:
    void reserve(size_t num_rows, size_t width);
    void set(size_t row, const float* x, WeightType type, size_t width);  // x: [width], padded with zeros to 64

    QuantisedRows quantised(size_t width) const {
        const size_t padded = round_up(width, kInt4Group);
        return {values_.data(), padded, padded / kInt4Group, scales_.data(), sums_.data()};
    }
    SpreadRows spread(size_t width) const { return {values_.data(), round_up(width, kInt8Group), scales_.data(), sums_.data()}; }
    BlockRows blocks(size_t width) const {
        const size_t supers = round_up(width, kSuper) / kSuper;
        return {values_.data(), supers, round_up(width, kStretch) / kStretch, facts_.data()};
    }
    FloatRows floats(size_t width) const { return {floats_.data(), width}; }

  private:
    AlignedVector<int8_t> values_;
    AlignedVector<float> floats_, scales_;
    AlignedVector<int32_t> sums_;
    AlignedVector<SuperFacts> facts_;
};

class Matrix {
  public:
    // From float32 [out, in]. int8 and int4_row have one scale per output; int4 has a scale and a minimum for each 32 inputs.
    static Matrix pack(const float* weights, size_t out, size_t in, WeightType type);
    // The same with rows from `read(index, to)`, [in], on all threads, so that the whole matrix is never in memory as float32.
    static Matrix pack_rows(ThreadPool& pool, size_t out, size_t in, WeightType type, const std::function<void(size_t, float*)>& read);
    // From 4-bit blocks of GGUF: values 0..15 [out, in], one per byte, scales and minima float16 [out, in / 32].
    static Matrix pack_int4(const uint8_t* values, const uint16_t* scales, const uint16_t* minima, size_t out, size_t in);

    // From rows in a file's blocks, which are kept as they are. row_at: bytes of a row.
    static Matrix keep_blocks(ThreadPool& pool, size_t out, size_t in, WeightType type, const std::function<const uint8_t*(size_t)>& row_at);
    // Bytes of the buffers that a matrix consists of, in their order.
    static std::vector<size_t> buffer_bytes(WeightType type, size_t out, size_t in);
    // A matrix over buffers of these sizes, as `buffers` of another told them.
    static Matrix over(WeightType type, size_t out, size_t in, const std::vector<Buffer>& buffers) { return Matrix(type, out, in, buffers); }

    Matrix(Matrix&&) = default;
    Matrix(const Matrix&) = delete;

    size_t out() const { return out_; }
    size_t in() const { return in_; }
    WeightType type() const { return type_; }
    size_t num_panels() const { return (out_ + kPanel - 1) / kPanel; }
    size_t bytes() const { return packed_.size() + scales_.size(); }
    std::vector<Buffer> buffers() const { return {packed_, scales_}; }
    bool writable() const { return packed_.writable(); }

    // Multiply rows first..end of the activations with adjacent panels: to[(row - first) * stride + o], o < 32 * num_panels.
    void multiply(size_t panel, size_t num_panels, const Activations& x, size_t first, size_t end, float* to, size_t stride) const;

    // Unpack one row to float32 [in], as for the embedding of a token.
    void row(size_t index, float* to) const;
    // Replace one row [in]. No product may be running, and the matrix must be writable and have no blocks of a file.
    void put_row(size_t index, const float* weights);

  private:
    Matrix(WeightType type, size_t out, size_t in, std::vector<Buffer> buffers);
    static Matrix empty(WeightType type, size_t out, size_t in);
    float* scales() const { return reinterpret_cast<float*>(scales_.data()); }
    size_t panel_bytes() const { return panel_bytes(type_, in_); }
    static size_t panel_bytes(WeightType type, size_t in);
    void pack_spread_row(const float* weights, size_t index);
    void put_int8(size_t index, const float* spread, size_t padded);
    void put_int4(size_t index, const float* spread, size_t padded);
    void unpack_spread_row(size_t index, float* to) const;
    void pack_int4_row(const float* weights, size_t index);
    void put_int4_block(size_t index, size_t block, const uint8_t* values, uint16_t scale, uint16_t minimum);

    WeightType type_;
    size_t out_, in_;
    Buffer packed_;
    Buffer scales_;  // float32 [num_panels * 32], only of spread weights
};

// One product of a phase: x times a matrix, plus a bias.
struct Product {
    const Matrix* matrix;
    const Activations* x;
    float* out;                      // [num_tokens, stride]
    size_t stride;                   // at least the outputs of the matrix, rounded up to a panel
    const std::vector<float>* bias;  // null or empty: none
};

// Compute adjacent panels of a product, of rows first..end.
void multiply_panels(const Product& product, size_t panel, size_t num_panels, size_t first, size_t end);

// Compute products in one phase, inside `ThreadPool::run`.
void multiply_all(ThreadPool& pool, std::initializer_list<Product> products, size_t num_tokens);

}  // namespace paceline
