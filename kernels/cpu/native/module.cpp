// The Python face of the native operations: what a step's batch means in token rows (`AttentionPlan`, made once a step),
// the choice of the instruction set, and threads where they pay. Addresses of tensors come as integers: their shapes,
// types and strides are checked by kernels/cpu/backend.py and kernels/cpu/packed.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <vector>

#include "ops.hpp"

#ifdef BLOCKCAST_AMX_VARIANT
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace nb = nanobind;

namespace blockcast {

namespace {

using Address = std::uintptr_t;
using Numbers = nb::ndarray<const i64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const i64, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

constexpr i64 kThreadMultiplications = 4'000'000;  // below that, starting a thread costs more than it gains
constexpr i64 kThreadWeights = 500'000;  // the same of a matrix, which is read whole however few its rows of x

#ifdef BLOCKCAST_AMX_VARIANT
// Whether the CPU has AMX and the kernel lets this process, with all its threads, use tiles.
bool has_amx() {
    unsigned eax, ebx, ecx, edx;
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || ~edx & (kAmxBf16 | kAmxTile)) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

std::vector<const Variant*> variants() {
    std::vector<const Variant*> found;
#ifdef BLOCKCAST_X86_VARIANTS
    __builtin_cpu_init();
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#ifdef BLOCKCAST_AVX512BF16_VARIANT
    if (has_avx512 && __builtin_cpu_supports("avx512bf16")) {
#ifdef BLOCKCAST_AMX_VARIANT
        if (has_amx()) found.push_back(&amx_variant);
#endif
        found.push_back(&avx512bf16_variant);
    }
#endif
    if (has_avx512) found.push_back(&avx512_variant);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&avx2_variant);
#endif
    found.push_back(&baseline_variant);
    return found;
}

const std::vector<const Variant*> kVariants = variants();
const Variant* chosen = kVariants.front();

const Ops& ops(bool bf16) { return bf16 ? chosen->bf16 : chosen->fp32; }

template <class T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// Runs `work` in so many threads, this one included, or in as many as are to be had: each takes what is left to do.
template <class Work>
void in_threads(i64 threads, const Work& work) {
    std::vector<std::thread> others;
    try {
        for (i64 i = 1; i < threads; ++i) others.emplace_back(work);
    } catch (const std::system_error&) {
        // No more threads to be had: those that run do it all.
    }
    work();
    for (std::thread& other : others) other.join();
}

// Memory that its user writes before reading it. Writing zeros first took 6 % of the attention of 16 tokens.
std::unique_ptr<float[]> allocate_scratch(i64 floats) {
    return std::unique_ptr<float[]>(new float[static_cast<std::size_t>(floats)]);
}

// Panels are taken in pieces, some for each thread.
void multiply(const Product& p, i64 threads) {
    const i64 panels = (p.outputs + kPanel - 1) / kPanel;
    threads = std::clamp<i64>(p.outputs * p.inputs / kThreadWeights, 1, threads);
    const i64 piece = threads == 1 ? panels : std::max<i64>(panels / (4 * threads), 1);
    std::atomic<i64> next{0};
    in_threads(threads, [&] {
        const auto scratch = allocate_scratch(product_scratch_floats(p.rows, p.inputs));
        for (i64 begin = next.fetch_add(piece); begin < panels; begin = next.fetch_add(piece)) {
            chosen->bf16.product(p, begin, std::min(begin + piece, panels), scratch.get());
        }
    });
}

// The blocks of one attention group inside the pool, counted in token rows (kernels/interface.py: PagedKV).
struct Layout {
    i64 total_rows, unit_rows, blocks_per_unit, block_size, layers, kv_heads, dim;

    i64 block_rows() const { return 2 * layers * block_size; }
};

class AttentionPlan {
public:
    AttentionPlan(const Numbers& query_starts, const Numbers& context_lens, const Table& block_table,
                  const Layout& layout, bool bf16, std::optional<i64> window)
        : layout_(layout), bf16_(bf16) {
        const i64 sequences = static_cast<i64>(context_lens.shape(0)), width = static_cast<i64>(block_table.shape(1));
        const i64 *starts = query_starts.data(), *lens = context_lens.data();
        slots_.reserve(static_cast<std::size_t>(starts[sequences]));
        block_rows_.reserve(static_cast<std::size_t>(sequences * width));  // so that spans can point into it
        for (i64 i = 0; i < sequences; ++i) {
            const i64 count = starts[i + 1] - starts[i], blocks = (lens[i] + layout.block_size - 1) / layout.block_size;
            if (count < 0 || lens[i] < count || blocks > width) {
                throw std::invalid_argument("sequence " + std::to_string(i) + " of " + std::to_string(lens[i]) +
                                            " tokens: expected no fewer than its queries, and all its blocks");
            }
            const i64* const table = block_table.data() + i * width;
            const i64* const rows = block_rows_.data() + block_rows_.size();
            for (i64 block = 0; block < blocks; ++block) block_rows_.push_back(find_row(table[block]));
            for (i64 position = lens[i] - count; position < lens[i]; ++position) {
                slots_.push_back(rows[position / layout.block_size] + position % layout.block_size);
            }
            const Span span{starts[i], rows, lens[i] - count, count, window.value_or(0)};
            if (count > 1) chunks_.push_back(span);
            if (count == 1) decodes_.push_back(span);
            attended_ += count * std::min(lens[i], window.value_or(lens[i]));
        }
    }

    // Stores k and v of the whole batch, then attends.
    void attend(Address buffer, i64 layer, Address q, i64 q_stride, i64 heads, Address k, i64 k_stride, Address v,
                i64 v_stride, Address out, float scale, int threads) const {
        const nb::gil_scoped_release released;
        const i64 item = bf16_ ? 2 : 4, row = layout_.kv_heads * layout_.dim * item;
        char* const keys = at<char>(buffer) + layer * 2 * layout_.block_size * row;
        char* const values = keys + layout_.block_size * row;
        store(keys, at<const char>(k), k_stride * item, row);
        store(values, at<const char>(v), v_stride * item, row);
        const Attention attention{at<const void>(q), keys, values, at<void>(out), q_stride, heads, layout_.kv_heads,
                                  layout_.dim, layout_.block_size, scale};
        const i64 useful = std::min<i64>(threads, attended_ * heads * layout_.dim * 2 / kThreadMultiplications);
        run(attention, static_cast<int>(std::max<i64>(useful, 1)));
    }

private:
    i64 find_row(i64 block) const {
        const i64 row = block / layout_.blocks_per_unit * layout_.unit_rows +
                        block % layout_.blocks_per_unit * layout_.block_rows();
        if (block < 0 || row + layout_.block_rows() > layout_.total_rows) {
            throw std::invalid_argument("block " + std::to_string(block) + ": expected one inside the pool");
        }
        return row;
    }

    void store(char* rows, const char* from, i64 stride, i64 row) const {
        for (std::size_t i = 0; i < slots_.size(); ++i) {
            std::memcpy(rows + slots_[i] * row, from + static_cast<i64>(i) * stride, static_cast<std::size_t>(row));
        }
    }

    // Threads take what is left to do: a KV head of some queries of a chunk, the longest ones first, or of a decode.
    void run(const Attention& attention, int threads) const {
        struct Item {
            const Span& span;
            i64 begin, head;
        };
        std::vector<Item> items;
        const i64 group = attention.heads / layout_.kv_heads, some = span_queries(group);
        for (const Span& span : chunks_) {
            for (i64 begin = (span.count - 1) / some * some; begin >= 0; begin -= some) {
                for (i64 head = 0; head < layout_.kv_heads; ++head) items.push_back({span, begin, head});
            }
        }
        // One thread does all the heads of a decode in one go.
        const i64 heads_each = threads == 1 ? layout_.kv_heads : 1;
        for (const Span& span : decodes_) {
            for (i64 head = 0; head < layout_.kv_heads; head += heads_each) items.push_back({span, 0, head});
        }
        const i64 scratch_size = std::max(chunks_.empty() ? 0 : span_scratch_floats(group, layout_.dim),
                                          scratch_floats(attention.heads, layout_.dim));
        std::atomic<std::size_t> next{0};
        in_threads(threads, [&] {
            const auto scratch = allocate_scratch(scratch_size);
            for (std::size_t i = next++; i < items.size(); i = next++) {
                const auto& [span, begin, head] = items[i];
                if (span.count > 1) {
                    const i64 end = std::min(begin + some, span.count);
                    ops(bf16_).attend_span(attention, span, head, begin, end, scratch.get());
                } else {
                    const Span* const after = threads == 1 && i + 1 < items.size() ? &items[i + 1].span : nullptr;
                    ops(bf16_).attend(attention, span, after, head, head + heads_each, scratch.get());
                }
            }
        });
    }

    Layout layout_;
    bool bf16_;
    std::vector<i64> slots_;  // row of each token's K, layer 0
    std::vector<i64> block_rows_;  // of each sequence's blocks, one sequence after another
    std::vector<Span> chunks_, decodes_;  // with several queries, and with one
    i64 attended_ = 0;  // keys that the queries see
};

void use(const std::string& name) {
    for (const Variant* variant : kVariants) {
        if (name == variant->name) {
            chosen = variant;
            return;
        }
    }
    throw std::invalid_argument("instruction set '" + name + "': expected one that this CPU has");
}

}  // namespace

}  // namespace blockcast

NB_MODULE(_native, module) {
    using namespace blockcast;
    module.doc() = "Native operations on a CPU (C++). Use kernels.select.";

    // Those this CPU has, best first; the first one is used unless `use` says other.
    module.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const Variant* variant : kVariants) names.emplace_back(variant->name);
        return names;
    });
    module.def("use", &use);

    nb::class_<Layout>(module, "Layout").def(nb::init<i64, i64, i64, i64, i64, i64, i64>());
    nb::class_<AttentionPlan>(module, "AttentionPlan")
        .def(nb::init<const Numbers&, const Numbers&, const Table&, const Layout&, bool, std::optional<i64>>())
        .def("attend", &AttentionPlan::attend);

    module.def("norm", [](bool bf16, Address x, Address weight, Address residual, Address out, i64 tokens, i64 heads,
                          i64 dim, i64 x_stride, i64 weight_stride, float eps, bool zero_centred) {
        const nb::gil_scoped_release released;
        ops(bf16).norm(Norm{at<const void>(x), at<const void>(weight), at<void>(residual), at<void>(out), tokens, heads,
                            dim, x_stride, weight_stride, eps, zero_centred});
    });
    module.def("rotate", [](bool bf16, Address x, Address cos, Address signed_sin, Address out, i64 tokens, i64 heads,
                            i64 dim, i64 width, i64 x_stride) {
        const nb::gil_scoped_release released;
        ops(bf16).rotate(Rotation{at<const void>(x), at<const void>(cos), at<const void>(signed_sin), at<void>(out),
                                  tokens, heads, dim, width, x_stride});
    });
    module.def("has_products", [] { return chosen->bf16.product != nullptr; });
    module.def("product", [](Address x, i64 rows, i64 x_stride, Address packed, i64 outputs, i64 inputs, Address bias,
                             Address out, i64 threads) {
        if (chosen->bf16.product == nullptr) {
            throw std::runtime_error(std::string("products need fused multiply-add, which is not in ") + chosen->name);
        }
        const nb::gil_scoped_release released;
        multiply(Product{at<const void>(x), at<const void>(packed), at<const void>(bias), at<void>(out), rows, inputs,
                         outputs, x_stride},
                 threads);
    });
    module.def("silu_and_mul", [](bool bf16, Address x, Address out, i64 tokens, i64 size) {
        const nb::gil_scoped_release released;
        ops(bf16).silu_and_mul(at<const void>(x), at<void>(out), tokens, size);
    });
}
