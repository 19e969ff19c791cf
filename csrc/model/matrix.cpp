#include "model/matrix.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "base/half.h"
#include "model/file_blocks.h"

namespace paceline {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;
constexpr size_t kChunkBytes = size_t{1} << 24;
constexpr size_t kChunkRows = 48;                 // token rows of one tile of a product: with a panel they should fit the L1 cache

uint16_t to_bfloat(float x) {
    const auto bits = std::bit_cast<uint32_t>(x);
    if (x != x) return static_cast<uint16_t>(bits >> 16 | 64);  // NaN stays NaN
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float from_bfloat(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

// The transform `hadamard` of a row [padded], valid until the thread's next call. It spreads a row's outliers over a block, so that
// 8 bits with one scale serve all of it (arXiv 2404.00456).
float* spread_of(const float* x, size_t padded) {
    thread_local AlignedVector<float> found;
    if (found.size() < padded) found.resize(padded);
    kernels().layer.hadamard(x, padded, found.data());
    return found.data();
}

// Write the 16 values that approximate numbers, a multiple of 64 of them, with the least squared error, and return their step; outliers
// are clipped. Lloyd's method, started at the best step for a normal distribution, which spread rows nearly have.
float to_int4(const float* x, size_t n, int8_t* values) {
    constexpr float normal = 0.335f;  // best step in standard deviations
    constexpr int rounds = 4;
    double sums[8] = {}, total = 0.0, products;
    int32_t squares;
    for (size_t i = 0; i < n; ++i) sums[i % 8] += double{x[i]} * x[i];
    for (const double sum : sums) total += sum;
    float step = normal * static_cast<float>(std::sqrt(total / static_cast<double>(n)));
    for (int round = 0; round < rounds && step > 0.0f; ++round) {
        kernels().layer.to_int4(x, n, step, values, &products, &squares);
        step = static_cast<float>(2.0 * products / squares);
    }
    kernels().layer.to_int4(x, n, step, values, &products, &squares);
    return step;
}

}  // namespace

Buffer::Buffer(size_t bytes, uint8_t fill) : bytes_(bytes) {
    struct Chunk {
        std::shared_ptr<uint8_t> memory;
        size_t size = 0, used = 0;
    };
    static Chunk open;
    static std::mutex one_at_a_time;
    const std::lock_guard<std::mutex> alone(one_at_a_time);
    const size_t wanted = round_up(std::max<size_t>(bytes, 1), kAlignment);
    if (open.size - open.used < wanted) {
        const size_t size = round_up(std::max(wanted + kBytesBehind, kChunkBytes), kHugePage);
        void* p = std::aligned_alloc(kHugePage, size);
        if (!p) throw std::bad_alloc();
#if defined(__linux__)
        madvise(p, size, MADV_HUGEPAGE);
#endif
        open = {std::shared_ptr<uint8_t>(static_cast<uint8_t*>(p), [](uint8_t* q) { std::free(q); }), size - kBytesBehind, 0};
    }
    data_ = {open.memory, open.memory.get() + open.used};
    open.used += wanted;
    std::memset(data_.get(), fill, bytes);
}

Buffer::Buffer(std::shared_ptr<const void> owner, const uint8_t* at, size_t bytes)
    : data_(std::const_pointer_cast<void>(std::move(owner)), const_cast<uint8_t*>(at)), bytes_(bytes), writable_(false) {}

void Activations::reserve(size_t num_rows, size_t width) {
    width = round_up(width, kSuper);
    values_.resize(std::max(values_.size(), num_rows * width));
    floats_.resize(std::max(floats_.size(), num_rows * width));
    scales_.resize(std::max(scales_.size(), num_rows * width / kInt4Group));
    sums_.resize(std::max({sums_.size(), scales_.size(), num_rows * kTileLanes}));
    facts_.resize(std::max(facts_.size(), num_rows * width / kSuper));
}

void Activations::set(size_t row, const float* x, WeightType type, size_t width) {
    if (type == WeightType::f32 || type == WeightType::bf16) {
        std::memcpy(floats_.data() + row * width, x, width * sizeof(float));
        return;
    }
    if (is_spread(type)) {
        const size_t padded = round_up(width, kInt8Group);
        int32_t sum;
        kernels().layer.quantise(spread_of(x, padded), padded, padded, values_.data() + row * padded, &scales_[row], &sum);
        return (void)std::fill_n(&sums_[row * kTileLanes], kTileLanes, -128 * sum);
    }
    if (is_blocks(type)) {
        const size_t supers = round_up(width, kSuper) / kSuper, at = row * supers;
        kernels().blocks.quantise(x, round_up(width, kInt8Group), values_.data() + at * kSuper, &facts_[at]);
        return;
    }
    const size_t padded = round_up(width, kInt4Group), num_groups = padded / kInt4Group;
    kernels().layer.quantise(x, padded, kInt4Group, values_.data() + row * padded, scales_.data() + row * num_groups,
                             sums_.data() + row * num_groups);
}

Matrix::Matrix(WeightType type, size_t out, size_t in, std::vector<Buffer> buffers)
    : type_(type), out_(out), in_(in), packed_(std::move(buffers[0])), scales_(std::move(buffers[1])) {}

std::vector<size_t> Matrix::buffer_bytes(WeightType type, size_t out, size_t in) {
    const size_t num_panels = (out + kPanel - 1) / kPanel;
    return {num_panels * panel_bytes(type, in), is_spread(type) ? num_panels * kPanel * sizeof(float) : 0};
}

Matrix Matrix::empty(WeightType type, size_t out, size_t in) {
    const std::vector<size_t> sizes = buffer_bytes(type, out, in);
    const uint8_t zero = type == WeightType::int8 ? 128 : 0;  // how a 0 is stored, also in the padding
    return Matrix(type, out, in, {Buffer(sizes[0], zero), Buffer(sizes[1])});
}

size_t Matrix::panel_bytes(WeightType type, size_t in) {
    if (is_blocks(type)) return kBlockForms[form_of(type)].panel_bytes(in);
    switch (type) {
        case WeightType::int8: return round_up(in, kInt8Group) * kPanel;
        case WeightType::int4_row: return round_up(in, kInt8Group) * kPanel / 2;
        case WeightType::int4: return round_up(in, kInt4Group) / kInt4Group * kInt4BlockBytes;
        case WeightType::bf16: return in * kPanel * sizeof(uint16_t);
        default: break;
    }
    return in * kPanel * sizeof(float);
}

Matrix Matrix::pack(const float* weights, size_t out, size_t in, WeightType type) {
    Matrix m = empty(type, out, in);
    for (size_t o = 0; o < out; ++o, weights += in) m.put_row(o, weights);
    return m;
}

Matrix Matrix::pack_rows(ThreadPool& pool, size_t out, size_t in, WeightType type, const std::function<void(size_t, float*)>& read) {
    Matrix m = empty(type, out, in);
    pool.run([&](size_t) {
        AlignedVector<float> row(in);
        pool.each(m.num_panels(), [&](size_t panel) {
            for (size_t o = panel * kPanel; o < std::min((panel + 1) * kPanel, out); ++o) {
                read(o, row.data());
                m.put_row(o, row.data());
            }
        });
    });
    return m;
}

void Matrix::put_row(size_t index, const float* weights) {
    uint8_t* panel = packed_.data() + index / kPanel * panel_bytes();
    const size_t lane = index % kPanel;
    switch (type_) {
        case WeightType::int8:
        case WeightType::int4_row: return pack_spread_row(weights, index);
        case WeightType::int4: return pack_int4_row(weights, index);
        case WeightType::bf16:
            for (size_t i = 0; i < in_; ++i) reinterpret_cast<uint16_t*>(panel)[i * kPanel + lane] = to_bfloat(weights[i]);
            return;
        case WeightType::f32:
            for (size_t i = 0; i < in_; ++i) reinterpret_cast<float*>(panel)[i * kPanel + lane] = weights[i];
            return;
        default: return;
    }
}

void Matrix::pack_spread_row(const float* weights, size_t index) {
    const size_t padded = round_up(in_, kInt8Group);
    thread_local AlignedVector<float> row;
    row.assign(padded, 0.0f);
    std::copy_n(weights, in_, row.begin());
    float* found = spread_of(row.data(), padded);
    const float scale = 1.0f / static_cast<float>(hadamard_block(padded));  // activations are spread without a scale
    for (size_t i = 0; i < padded; ++i) found[i] *= scale;
    if (type_ == WeightType::int8)
        put_int8(index, found, padded);
    else
        put_int4(index, found, padded);
}

void Matrix::put_int8(size_t index, const float* spread, size_t padded) {
    thread_local std::vector<int8_t> values;
    values.resize(padded);
    int32_t sum;
    kernels().layer.quantise(spread, padded, padded, values.data(), &scales()[index], &sum);
    uint8_t* panel = packed_.data() + index / kPanel * panel_bytes() + index % kPanel * 4;
    for (size_t i = 0; i < padded; i += 4, panel += kPanel * 4) {
        uint32_t four;
        std::memcpy(&four, &values[i], sizeof four);
        four ^= 0x80808080u;  // adds 128 to each byte
        std::memcpy(panel, &four, sizeof four);
    }
}

void Matrix::put_int4(size_t index, const float* spread, size_t padded) {
    thread_local std::vector<int8_t> values;
    values.resize(padded);
    scales()[index] = to_int4(spread, padded, values.data()) / 2.0f;
    uint8_t* panel = packed_.data() + index / kPanel * panel_bytes() + index % kPanel * 4;
    for (size_t i = 0; i < padded; i += 8, panel += kPanel * 4)
        for (size_t j = 0; j < 4; ++j) panel[j] = static_cast<uint8_t>(values[i + j] | values[i + 4 + j] << 4);
}

void Matrix::pack_int4_row(const float* weights, size_t index) {
    constexpr uint8_t none[kInt4Group] = {};
    for (size_t start = 0, block = 0; start < in_; start += kInt4Group, ++block) {
        const size_t count = std::min(kInt4Group, in_ - start);
        const auto [low, high] = std::minmax_element(weights + start, weights + start + count);
        if (std::any_of(weights + start, weights + start + count, [](float x) { return std::isnan(x); })) {
            put_int4_block(index, block, none, to_half(NAN), to_half(NAN));
            continue;
        }
        const uint16_t scale = to_half((*high - *low) / 15.0f), minimum = to_half(*low);
        const float step = from_half(scale);
        uint8_t values[kInt4Group] = {};
        for (size_t i = 0; i < count && step > 0.0f; ++i)
            values[i] = static_cast<uint8_t>(std::clamp(std::lrintf((weights[start + i] - from_half(minimum)) / step), 0L, 15L));
        put_int4_block(index, block, values, scale, minimum);
    }
}

Matrix Matrix::pack_int4(const uint8_t* values, const uint16_t* scales, const uint16_t* minima, size_t out, size_t in) {
    Matrix m = empty(WeightType::int4, out, in);
    const size_t blocks = in / kInt4Group;
    for (size_t o = 0; o < out; ++o)
        for (size_t b = 0; b < blocks; ++b)
            m.put_int4_block(o, b, values + o * in + b * kInt4Group, scales[o * blocks + b], minima[o * blocks + b]);
    return m;
}

Matrix Matrix::keep_blocks(ThreadPool& pool, size_t out, size_t in, WeightType type, const std::function<const uint8_t*(size_t)>& row_at) {
    Matrix m = empty(type, out, in);
    pool.run([&](size_t) {
        pool.each(m.num_panels(), [&](size_t panel) {
            uint8_t* const to = m.packed_.data() + panel * m.panel_bytes();
            for (size_t o = panel * kPanel; o < std::min((panel + 1) * kPanel, out); ++o) put_file_row(form_of(type), row_at(o), in, to, o % kPanel);
        });
    });
    return m;
}

void Matrix::put_int4_block(size_t index, size_t block, const uint8_t* values, uint16_t scale, uint16_t minimum) {
    uint8_t* at = packed_.data() + index / kPanel * panel_bytes() + block * kInt4BlockBytes;
    const size_t lane = index % kPanel;
    reinterpret_cast<uint16_t*>(at)[lane] = scale;
    reinterpret_cast<uint16_t*>(at)[kPanel + lane] = minimum;
    uint8_t* to = at + kPanel * 4 + lane * 4;
    for (size_t pair = 0; pair < kInt4Group / 8; ++pair, to += kPanel * 4)
        for (size_t i = 0; i < 4; ++i)
            to[i] = static_cast<uint8_t>((values[pair * 8 + i] & 15) | (values[pair * 8 + 4 + i] & 15) << 4);
}

void Matrix::multiply(size_t panel, size_t num_panels, const Activations& x, size_t first, size_t end, float* to, size_t stride) const {
    const GemmKernels& gemm = kernels().gemm;
    const size_t step = is_spread(type_) ? num_panels : 1;
    for (const size_t last = panel + num_panels; panel < last; panel += step, to += step * kPanel) {
        const uint8_t* at = packed_.data() + panel * panel_bytes();
        if (is_blocks(type_)) {
            kernels().blocks.multiply[form_of(type_)](at, x.blocks(in_), first, end, to, stride);
            continue;
        }
        switch (type_) {
            case WeightType::int8:
            case WeightType::int4_row:
                (type_ == WeightType::int8 ? gemm.int8 : gemm.int4_row)({at, scales() + panel * kPanel}, num_panels,
                                                                        x.spread(in_), first, end, to, stride);
                break;
            case WeightType::int4: gemm.int4(at, x.quantised(in_), first, end, to, stride); break;
            case WeightType::bf16:
                gemm.bf16(reinterpret_cast<const uint16_t*>(at), x.floats(in_), first, end, to, stride);
                break;
            default: gemm.f32(reinterpret_cast<const float*>(at), x.floats(in_), first, end, to, stride);
        }
    }
}

void multiply_panels(const Product& p, size_t panel, size_t num_panels, size_t first, size_t end) {
    float* out = p.out + first * p.stride + panel * kPanel;
    p.matrix->multiply(panel, num_panels, *p.x, first, end, out, p.stride);
    if (!p.bias || p.bias->empty()) return;
    const size_t count = std::min(num_panels * kPanel, p.bias->size() - panel * kPanel);
    for (size_t row = first; row < end; ++row, out += p.stride)
        kernels().layer.add(out, p.bias->data() + panel * kPanel, count);
}

void multiply_all(ThreadPool& pool, std::initializer_list<Product> products, size_t num_tokens) {
    const size_t chunks = std::max<size_t>((num_tokens + kChunkRows - 1) / kChunkRows, 1);
    size_t num_panels = 0;
    for (const Product& p : products) num_panels += p.matrix->num_panels();
    const auto multiply_some = [&](size_t panel, size_t end_panel, size_t chunk) {
        const size_t first = num_tokens * chunk / chunks, end = num_tokens * (chunk + 1) / chunks;
        size_t left = end_panel - panel;
        for (const Product* p = products.begin(); left > 0; panel -= std::min(panel, p->matrix->num_panels()), ++p) {
            if (panel >= p->matrix->num_panels()) continue;
            const size_t count = std::min(left, p->matrix->num_panels() - panel);
            multiply_panels(*p, panel, count, first, end);
            panel += count, left -= count;
        }
    };
    if (chunks == 1) return pool.each_run(num_panels, [&](size_t panel, size_t end) { multiply_some(panel, end, 0); });
    const size_t num_pairs = (num_panels + 1) / 2;  // pairs of panels: a task of one panel would be short beside its claim
    pool.each(num_pairs * chunks, [&](size_t i) {
        const size_t panel = i / chunks * 2;
        multiply_some(panel, std::min(panel + 2, num_panels), i % chunks);
    });
}

void Matrix::unpack_spread_row(size_t index, float* to) const {
    const uint8_t* panel = packed_.data() + index / kPanel * panel_bytes() + index % kPanel * 4;
    const size_t padded = round_up(in_, kInt8Group);
    thread_local AlignedVector<float> found;
    found.resize(padded);
    for (size_t i = 0; i < padded; ++i) {
        const int whole = type_ == WeightType::int8 ? panel[i / 4 * kPanel * 4 + i % 4] - 128
                                                    : 2 * (panel[i / 8 * kPanel * 4 + i % 4] >> (i % 8 < 4 ? 0 : 4) & 15) - 15;
        found[i] = static_cast<float>(whole) * scales()[index];
    }
    std::copy_n(spread_of(found.data(), padded), in_, to);
}

void Matrix::row(size_t index, float* to) const {
    const uint8_t* panel = packed_.data() + index / kPanel * panel_bytes();
    const size_t lane = index % kPanel;
    if (is_spread(type_)) return unpack_spread_row(index, to);
    if (is_blocks(type_)) return read_block_row(form_of(type_), panel, lane, in_, to);
    for (size_t i = 0; i < in_; ++i) switch (type_) {
            case WeightType::int4: {
                const uint8_t* block = panel + i / kInt4Group * kInt4BlockBytes;
                const uint16_t* halves = reinterpret_cast<const uint16_t*>(block);
                const size_t inner = i % kInt4Group;
                const uint8_t both = block[kPanel * 4 + (inner / 8 * kPanel + lane) * 4 + inner % 4];
                const int value = inner % 8 < 4 ? both & 15 : both >> 4;
                to[i] = from_half(halves[lane]) * static_cast<float>(value) + from_half(halves[kPanel + lane]);
                break;
            }
            case WeightType::bf16: to[i] = from_bfloat(reinterpret_cast<const uint16_t*>(panel)[i * kPanel + lane]); break;
            case WeightType::f32: to[i] = reinterpret_cast<const float*>(panel)[i * kPanel + lane]; break;
            default: break;
        }
}

}  // namespace paceline
