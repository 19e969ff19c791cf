// Thread pools, packed weights and their products, and stores of keys and values.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "base/checksum.h"
#include "bind/arrays.h"
#include "host/measure.h"
#include "model/blocks.h"
#include "model/file_blocks.h"
#include "model/fuse.h"
#include "model/matrix.h"

namespace paceline {
namespace {

constexpr size_t kMaxLayers = 4096;
constexpr size_t kMaxTimed = size_t{1} << 28;  // most products of a matrix that are timed

WeightType weight_type(const std::string& name) {
    using enum WeightType;
    const auto form = std::ranges::find(kBlockNames, name) - std::begin(kBlockNames);
    if (static_cast<size_t>(form) < kNumBlockForms) return static_cast<WeightType>(static_cast<size_t>(q4_k) + form);
    return named<WeightType>(name, {{"int8", int8}, {"int4_row", int4_row}, {"int4", int4}, {"bf16", bf16}, {"f32", f32}},
                             "weights are int8, int4_row, int4, bf16, f32 or blocks such as Q4_K");
}

KVType kv_type(const std::string& name) {
    using enum KVType;
    return named<KVType>(name, {{"i16", i16}, {"i8", i8}, {"f16", f16}, {"f32", f32}}, "KV is i16, i8, f16 or f32");
}

void check_sides(size_t out, size_t in, WeightType type) {
    require(0 < out && out <= kMaxSide && 0 < in && in <= kMaxSide, "a matrix has 1 to 2**24 rows and columns");
    require(!is_spread(type) || in <= kMaxInputs, "a matrix of int8 or int4_row has at most 2**16 columns");
}

std::shared_ptr<Matrix> pack(const Table<float>& weights, const std::string& type) {
    const WeightType chosen = weight_type(type);
    check_sides(weights.shape(0), weights.shape(1), chosen);
    require(!is_blocks(chosen), "a file's blocks are kept, not made of other numbers");
    nb::gil_scoped_release unlocked;
    return std::make_shared<Matrix>(Matrix::pack(weights.data(), weights.shape(0), weights.shape(1), chosen));
}

std::shared_ptr<Matrix> pack_int4(const Table<uint8_t>& values, const Table<uint16_t>& scales, const Table<uint16_t>& minima) {
    const size_t out = values.shape(0), in = values.shape(1);
    check_sides(out, in, WeightType::int4);
    require(in % kInt4Group == 0, "rows of 4-bit blocks are multiples of 32 long");
    for (const auto* halves : {&scales, &minima})
        require(halves->shape(0) == out && halves->shape(1) == in / kInt4Group,
                "4-bit blocks need a scale and a minimum for every 32 values");
    nb::gil_scoped_release unlocked;
    return std::make_shared<Matrix>(Matrix::pack_int4(values.data(), scales.data(), minima.data(), out, in));
}

// Pack stored blocks. A type of weights that is a type of blocks keeps them as they are stored.
std::shared_ptr<Matrix> pack_blocks(ThreadPool& pool, const Array<uint8_t>& data, const std::string& stored, size_t out, size_t in,
                                    const std::string& type) {
    const BlockFormat* format = block_format(stored);
    const WeightType chosen = weight_type(type);
    require(is_blocks(chosen) ? stored == type : format != nullptr, "there are no blocks of this name: " + stored);
    check_sides(out, in, chosen);
    const size_t row_bytes = is_blocks(chosen) ? file_row_bytes(form_of(chosen), in) : format->row_bytes(in);
    const size_t count = is_blocks(chosen) ? file_block(form_of(chosen)) : format->count;
    require(in % count == 0 && data.size() == out * row_bytes, "the blocks do not fit the matrix");
    nb::gil_scoped_release unlocked;
    const auto row_at = [&](size_t o) { return data.data() + o * row_bytes; };
    if (is_blocks(chosen)) return std::make_shared<Matrix>(Matrix::keep_blocks(pool, out, in, chosen, row_at));
    return std::make_shared<Matrix>(
        Matrix::pack_rows(pool, out, in, chosen, [&](size_t o, float* to) { format->unpack_row(row_at(o), in, to); }));
}

std::shared_ptr<Matrix> pack_rows(ThreadPool& pool, const Matrix& source, const Ids& rows, const std::string& type) {
    const WeightType chosen = weight_type(type);
    check_sides(rows.size(), source.in(), chosen);
    require(!is_blocks(chosen), "a file's blocks are kept, not made of other numbers");
    for (size_t i = 0; i < rows.size(); ++i) require(static_cast<uint64_t>(rows.data()[i]) < source.out(), "no such row");
    nb::gil_scoped_release unlocked;
    return std::make_shared<Matrix>(Matrix::pack_rows(pool, rows.size(), source.in(), chosen, [&](size_t o, float* to) {
        source.row(static_cast<size_t>(rows.data()[o]), to);
    }));
}

nb::list buffers(const std::shared_ptr<Matrix>& matrix) {
    nb::list found;
    for (const Buffer& buffer : matrix->buffers())
        found.append(nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(buffer.data(), {buffer.size()}, nb::find(matrix)));
    return found;
}

std::vector<size_t> buffer_bytes(const std::string& type, size_t out, size_t in) {
    const WeightType chosen = weight_type(type);
    check_sides(out, in, chosen);
    require(!is_blocks(chosen) || in % file_block(form_of(chosen)) == 0, "the blocks do not fit the matrix");
    return Matrix::buffer_bytes(chosen, out, in);
}

std::shared_ptr<Matrix> matrix_over(const Array<uint8_t>& data, const std::string& type, size_t out, size_t in,
                                    const std::vector<size_t>& starts) {
    const std::vector<size_t> sizes = buffer_bytes(type, out, in);
    require(starts.size() == sizes.size(), "a matrix of this type has another number of buffers");
    const auto owner = std::make_shared<const Array<uint8_t>>(data);
    std::vector<Buffer> parts;
    for (size_t i = 0; i < sizes.size(); ++i) {
        const size_t size = data.size(), needed = sizes[i] + kBytesBehind;
        require(needed <= size && starts[i] <= size - needed, "a buffer ends beyond its file");
        require(reinterpret_cast<uintptr_t>(data.data() + starts[i]) % kAlignment == 0, "a buffer is not aligned");
        parts.emplace_back(owner, data.data() + starts[i], sizes[i]);
    }
    return std::make_shared<Matrix>(Matrix::over(weight_type(type), out, in, parts));
}

std::vector<uint64_t> sums_of(ThreadPool& pool, const Array<uint8_t>& data, size_t piece) {
    require(piece > 0 && piece % kSumBlock == 0, "a piece is a multiple of 64 bytes");
    nb::gil_scoped_release unlocked;
    return checksums(pool, data.data(), data.size(), piece);
}

void multiply(ThreadPool& pool, const Matrix& matrix, const Table<float>& x, const Out<float>& out) {
    const size_t num_rows = x.shape(0), width = matrix.in(), stride = round_up(matrix.out(), kPanel);
    require(x.shape(1) == width && out.size() == num_rows * matrix.out(), "the rows do not fit the matrix");
    nb::gil_scoped_release unlocked;
    Activations rows;
    rows.reserve(num_rows, width);
    AlignedVector<float> padded(round_up(width, kInt8Group)), found(num_rows * stride);
    for (size_t row = 0; row < num_rows; ++row) {
        std::copy_n(x.data() + row * width, width, padded.data());
        rows.set(row, padded.data(), matrix.type(), width);
    }
    pool.run([&](size_t) { multiply_all(pool, {{&matrix, &rows, found.data(), stride, nullptr}}, num_rows); });
    for (size_t row = 0; row < num_rows; ++row)
        std::copy_n(&found[row * stride], matrix.out(), out.data() + row * matrix.out());
}

void fuse_states(ThreadPool& pool, const Matrix& fc, const Table<float>& states, const Table<float>& norms, float eps,
                 const Out<float>& features) {
    require(states.shape(1) == fc.in() && features.size() == states.shape(0) * fc.out(), "the states do not fit the matrix");
    require(norms.shape(0) == 0 || norms.shape(0) * norms.shape(1) == fc.in(), "the norms do not fit the states");
    nb::gil_scoped_release unlocked;
    fuse(pool, {&fc, norms.data(), norms.shape(0), eps}, states.data(), states.shape(0), features.data());
}

size_t checked(const KVStore& kv, size_t page) {
    require(page < kv.num_pages(), "no such page");
    return page;
}

void make_store(KVStore* self, const std::string& type, size_t num_pages, const std::vector<std::pair<size_t, size_t>>& heads,
                const std::vector<size_t>& sliding) {
    const KVType chosen = kv_type(type);
    require(0 < heads.size() && heads.size() <= kMaxLayers, "a model has 1 to 4096 layers");
    require(0 < num_pages && num_pages < size_t{1} << 40, "a KV store has at least one page");
    std::vector<HeadShape> shapes;
    for (const auto& [num_kv, dim] : heads) {
        for (size_t n : {num_kv, dim}) require(0 < n && n <= kMaxSide, "a size out of bounds");
        require(dim <= 256 || chosen == KVType::f16 || chosen == KVType::f32,
                "integer KV wants heads of at most 256 dimensions; f16 takes any");
        shapes.push_back({num_kv, dim});
    }
    require(KVStore::fits(chosen, num_pages, shapes), "a KV store of this many pages is larger than any memory");
    const HeadShape* beside = nullptr;  // heads of a layer that does not slide
    for (size_t i = 0; i < shapes.size() && !sliding.empty(); ++i) {
        if (std::find(sliding.begin(), sliding.end(), i) != sliding.end()) continue;
        require(!beside || shapes[i] == *beside, "layers beside sliding ones have equal heads");
        beside = &shapes[i];
    }
    for (size_t i = 0; i < sliding.size(); ++i) {
        require(sliding[i] < shapes.size() && (i == 0 || sliding[i - 1] < sliding[i]), "sliding layers are named once each, in order");
        require(shapes[sliding[i]] == shapes[sliding[0]], "sliding layers have equal heads");
    }
    new (self) KVStore(chosen, num_pages, std::move(shapes), sliding);
}

}  // namespace

void bind_weights(nb::module_& m) {
    nb::class_<ThreadPool>(m, "ThreadPool")
        .def("__init__", [](ThreadPool* self, size_t num_threads) {
            require(1 <= num_threads && num_threads <= 1024, "a pool has 1 to 1024 threads");
            new (self) ThreadPool(num_threads);
        }, "num_threads"_a)
        .def_prop_ro("num_threads", &ThreadPool::size);
    nb::class_<Matrix>(m, "Matrix")
        .def_prop_ro("num_bytes", &Matrix::bytes)
        .def_prop_ro("writable", &Matrix::writable)
        .def("row", [](const Matrix& self, size_t index, const Out<float>& to) {
            require(index < self.out() && to.size() == self.in(), "no such row");
            self.row(index, to.data());
        }, "index"_a, "to"_a)
        .def("put_row", [](Matrix& self, size_t index, const Array<float>& weights) {
            require(index < self.out() && weights.size() == self.in(), "no such row");
            require(self.writable() && !is_blocks(self.type()), "the matrix has a file's blocks or is mapped from a file, which is only read");
            self.put_row(index, weights.data());
        }, "index"_a, "weights"_a.noconvert());
    m.def("pack", &pack, "weights"_a.noconvert(), "dtype"_a);
    m.def("pack_int4", &pack_int4, "values"_a.noconvert(), "scales"_a.noconvert(), "minima"_a.noconvert());
    m.def("pack_blocks", &pack_blocks, "pool"_a, "data"_a.noconvert(), "stored"_a, "out"_a, "in_"_a, "dtype"_a);
    m.def("pack_rows", &pack_rows, "pool"_a, "source"_a, "rows"_a.noconvert(), "dtype"_a);
    m.def("block_names", [] {
        std::vector<std::string> names;
        for (const BlockFormat& format : block_formats()) names.emplace_back(format.name);
        return names;
    });
    m.def("kept_names", [] { return std::vector<std::string>(std::begin(kBlockNames), std::end(kBlockNames)); });
    m.def("buffers", &buffers, "matrix"_a);
    m.def("buffer_bytes", &buffer_bytes, "dtype"_a, "out"_a, "in_"_a);
    m.def("matrix_over", &matrix_over, "data"_a.noconvert(), "dtype"_a, "out"_a, "in_"_a, "starts"_a);
    m.def("checksums", &sums_of, "pool"_a, "data"_a.noconvert(), "piece"_a);
    m.def("multiply", &multiply, "pool"_a, "matrix"_a, "x"_a.noconvert(), "out"_a.noconvert());
    m.def("fuse", &fuse_states, "pool"_a, "fc"_a, "states"_a.noconvert(), "norms"_a.noconvert(), "eps"_a, "features"_a.noconvert());
    m.def("read_bandwidth", [](ThreadPool& pool, size_t bytes) {
        require(bytes <= size_t{1} << 34, "at most 16 GiB are read");
        return read_bandwidth(pool, bytes);
    }, "pool"_a, "bytes"_a, nb::call_guard<nb::gil_scoped_release>());
    m.attr("MOST_IN_PIECE") = kMostInPiece;
    m.def("set_prefetching", [](size_t rows, size_t bytes, bool past) {
        require(0 < rows && rows <= kMostInPiece && bytes <= 1 << 16, "so many rows are not one piece, or that is too far ahead");
        prefetching[rows] = {bytes, past};
    }, "rows"_a, "bytes"_a, "past"_a);
    m.def("dot_peak", &dot_peak, "pool"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def("time_products", [](ThreadPool& pool, const std::vector<std::shared_ptr<Matrix>>& matrices, size_t num_tokens, size_t repeats) {
        require(!matrices.empty() && 0 < num_tokens && num_tokens <= 1 << 16 && repeats <= 1 << 16, "nothing to time");
        for (const auto& matrix : matrices)
            require(matrix && num_tokens * matrix->out() <= kMaxTimed, "there is no such matrix to time, or its products are too many");
        nb::gil_scoped_release unlocked;
        return time_products(pool, matrices, num_tokens, repeats);
    }, "pool"_a, "matrices"_a, "num_tokens"_a, "repeats"_a);
    nb::class_<KVStore>(m, "KVStore")
        .def("__init__", &make_store, "dtype"_a, "num_pages"_a, "heads"_a, "sliding"_a = std::vector<size_t>{})
        .def_prop_ro("num_pages", &KVStore::num_pages)
        .def_prop_ro("bytes_per_token", &KVStore::bytes_per_token)
        .def_prop_ro("page_bytes", &KVStore::page_bytes)
        .def_prop_ro("window_bytes_per_token", [](const KVStore& self) { return self.window_bytes() / kPageTokens; })
        .def("drop_window", [](KVStore& self, size_t page) { self.drop_window(checked(self, page)); }, "page"_a)
        .def("drop_rest", [](KVStore& self, size_t page) { self.drop_rest(checked(self, page)); }, "page"_a)
        .def("read_page", [](const KVStore& self, size_t page, const OutArray<uint8_t>& to) {
            require(page < self.num_pages() && to.size() == self.page_bytes(), "no such page, or not its number of bytes");
            self.read_page(page, to.data());
        }, "page"_a, "to"_a.noconvert(), nb::call_guard<nb::gil_scoped_release>())
        .def("copy_page", [](KVStore& self, size_t from, size_t to) { self.copy_page(checked(self, from), checked(self, to)); },
             "source"_a, "target"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("write_page", [](KVStore& self, size_t page, const Array<uint8_t>& data) {
            require(page < self.num_pages() && data.size() == self.page_bytes(), "no such page, or not its number of bytes");
            self.write_page(page, data.data());
        }, "page"_a, "data"_a.noconvert(), nb::call_guard<nb::gil_scoped_release>());
    m.def("checksum", [](const Array<uint8_t>& data) { return checksum(data.data(), data.size()); }, "data"_a.noconvert(),
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace paceline
