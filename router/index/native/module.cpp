// The PrefixIndex protocol's methods (router/index/protocol.py): argument conversion, and the GIL released around the work.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>

#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

#include "index.hpp"

namespace nb = nanobind;
using namespace blockcast;

namespace {

// Token ids of a prompt as a flat array, borrowed from bytes and arrays if possible, else copied.
class Ids {
public:
    explicit Ids(nb::handle source) {
        if (PyList_Check(source.ptr()) || PyTuple_Check(source.ptr())) {
            copy_items(source.ptr());
        } else if (PyObject_CheckBuffer(source.ptr())) {
            read_buffer(source.ptr());
        } else {
            copy_sequence(source.ptr());
        }
    }
    Ids(const Ids&) = delete;

    const u32* data() const { return data_; }
    std::size_t size() const { return size_; }
    std::size_t copied_bytes() const { return owned_.capacity() * sizeof(u32); }
    // Count the first token ids that both have in common.
    std::size_t count_common(const Ids& other) const {
        constexpr std::size_t kAtOnce = 512;
        const std::size_t most = std::min(size_, other.size_);
        std::size_t same = 0;
        while (same + kAtOnce <= most && std::memcmp(data_ + same, other.data_ + same, kAtOnce * sizeof(u32)) == 0) same += kAtOnce;
        while (same < most && data_[same] == other.data_[same]) ++same;
        return same;
    }

private:
    void use_owned() {
        data_ = owned_.data();
        size_ = owned_.size();
    }

    [[noreturn]] static void reject(std::size_t index, const std::string& value) {
        throw nb::value_error(("token_ids[" + std::to_string(index) + "] is " + value + ": expected 0 <= id < 2^32").c_str());
    }

    // Return the value of an int of one digit (below 2^30), as all token ids of today are, without a call.
    static std::optional<u32> small_int(PyObject* item) {
        if (!PyLong_CheckExact(item)) return std::nullopt;
        PyLongObject* number = reinterpret_cast<PyLongObject*>(item);
#if PY_VERSION_HEX >= 0x030C0000
        if (!PyUnstable_Long_IsCompact(number)) return std::nullopt;
        const Py_ssize_t value = PyUnstable_Long_CompactValue(number);
        if (value < 0) return std::nullopt;
        return static_cast<u32>(value);
#else
        if (Py_SIZE(number) != 1) return std::nullopt;
        return static_cast<u32>(number->ob_digit[0]);
#endif
    }

    void copy_sequence(PyObject* source) {
        const nb::object items = nb::steal(PySequence_List(source));
        if (!items.is_valid()) throw nb::python_error();
        copy_items(items.ptr());
    }

    void copy_items(PyObject* items) {
        const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
        PyObject** const item = PySequence_Fast_ITEMS(items);
        owned_.resize(static_cast<std::size_t>(count));
        for (Py_ssize_t i = 0; i < count; ++i) {
            if (const std::optional<u32> small = small_int(item[i])) {
                owned_[static_cast<std::size_t>(i)] = *small;
                continue;
            }
            int overflow = 0;
            const long value = PyLong_AsLongAndOverflow(item[i], &overflow);
            if (value == -1 && overflow == 0 && PyErr_Occurred()) throw nb::python_error();
            if (overflow != 0 || value < 0 || value >> 32 != 0) {
                reject(static_cast<std::size_t>(i), nb::cast<std::string>(nb::str(nb::handle(item[i]))));
            }
            owned_[static_cast<std::size_t>(i)] = static_cast<u32>(value);
        }
        use_owned();
    }

    // Borrow unsigned integers of four bytes and raw bytes; read any other integers one by one.
    void read_buffer(PyObject* source) {
        if (PyObject_GetBuffer(source, &borrowed_.view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) throw nb::python_error();
        const Py_buffer& view = borrowed_.view;
        const std::string format = view.format == nullptr ? "B" : view.format;
        const bool raw = format == "B" || format == "b" || format == "c";
        if (!raw && format.find_first_not_of("<=@iIlLqQhH") != std::string::npos) {
            throw nb::value_error("token_ids: expected a buffer of integers");
        }
        if (!raw && !(format == "I" || (format == "L" && view.itemsize == sizeof(u32)))) return copy_sequence(source);
        const std::size_t bytes = static_cast<std::size_t>(view.len);
        if (bytes % sizeof(u32) != 0) {
            throw nb::value_error(("token bytes: length " + std::to_string(bytes) + " is not a multiple of 4").c_str());
        }
        data_ = static_cast<const u32*>(view.buf);
        size_ = bytes / sizeof(u32);
        if (reinterpret_cast<std::uintptr_t>(data_) % alignof(u32) != 0) {
            owned_.resize(size_);
            std::memcpy(owned_.data(), view.buf, bytes);
            use_owned();
        }
    }

    std::vector<u32> owned_;
    const u32* data_ = nullptr;
    std::size_t size_ = 0;
    // A member with a destructor, so that the buffer is released even if the constructor of Ids throws.
    struct Borrowed {
        Py_buffer view{};
        ~Borrowed() { PyBuffer_Release(&view); }  // without effect for an empty view
    } borrowed_;
};

// Prompt of several calls, with the keys that they computed so far.
struct Prompt {
    explicit Prompt(nb::handle source) : ids(source) {}

    // Take the keys of another prompt for the first tokens that both have.
    void resume(Prompt& similar) {
        const nb::gil_scoped_release released;
        const std::lock_guard alone(similar.mutex);
        memo.resume(similar.memo, ids.count_common(similar.ids), ids.size());
    }

    std::size_t bytes() {
        const nb::gil_scoped_release released;
        const std::lock_guard alone(mutex);
        return memo.keys.capacity() * sizeof(u64) + ids.copied_bytes();
    }

    const Ids ids;
    std::mutex mutex;
    KeyMemo memo;  // under the mutex
};

// Argument of a call: a Prompt, locked while the call works, or token ids in any form.
class PromptArgument {
public:
    explicit PromptArgument(nb::handle source) {
        if (nb::isinstance<Prompt>(source)) {
            prompt_ = nb::cast<Prompt*>(source);
        } else {
            ids_.emplace(source);
        }
    }

    // Call work(Tokens) without the GIL, as another thread may hold the prompt.
    template <class Work>
    auto with(Work work) const {
        const nb::gil_scoped_release released;
        if (prompt_ == nullptr) return work(Tokens{ids_->data(), ids_->size(), nullptr});
        const std::lock_guard alone(prompt_->mutex);
        return work(Tokens{prompt_->ids.data(), prompt_->ids.size(), &prompt_->memo});
    }

private:
    Prompt* prompt_ = nullptr;
    std::optional<Ids> ids_;
};

// IngestTask of router/index/protocol.py.
struct Ingesting {
    Ingesting(Index& index, u64 holder, nb::bytes payload, double now_s)
        : index(index), payload(payload),
          ingest{holder, static_cast<const u8*>(payload.data()), payload.size(), now_s} {}
    Index& index;
    const nb::bytes payload;
    Ingest ingest;
};

// Read a group from a mapping with the keys of `GET /kv_cache/groups`.
Group read_group(nb::handle entries) {
    const nb::object get = entries.attr("get");
    Group group;
    group.key = nb::cast<std::optional<std::int64_t>>(get("group_idx"));
    group.kind = nb::cast<std::optional<std::string>>(get("kind"));
    group.block_size = nb::cast<std::optional<u64>>(get("block_size"));
    group.window = nb::cast<std::optional<u64>>(get("sliding_window"));
    return group;
}

nb::dict describe_group(const Group& group) {
    nb::dict entries;
    entries["group_idx"] = group.key;
    entries["kind"] = group.kind;
    entries["block_size"] = group.block_size;
    entries["sliding_window"] = group.window;
    return entries;
}

// DumpTask of router/index/protocol.py.
struct Dumping {
    std::optional<nb::list> step() {
        if (dump.done) return std::nullopt;
        std::vector<DumpPart> parts;
        {
            const nb::gil_scoped_release released;
            parts = index.step(dump);
        }
        nb::list out;
        for (const DumpPart& part : parts) {
            nb::dict entries = describe_group(part.group);
            entries["fingerprint"] = part.fingerprint;
            entries["announced"] = part.group.announced;
            entries["sparse"] = part.group.sparse;
            entries["tier"] = part.tier;
            entries["rows"] = nb::bytes(part.rows.data(), part.rows.size() * sizeof(DumpRow));
            out.append(entries);
        }
        return out;
    }
    const Index& index;
    Dump dump;
};

Report load(Index& index, u64 holder, nb::dict entries) {
    const nb::bytes rows = nb::cast<nb::bytes>(entries["rows"]);
    DumpPart part{nb::cast<u64>(entries["fingerprint"]), read_group(entries), nb::cast<u32>(entries["tier"]), {}};
    part.group.announced = nb::cast<bool>(entries["announced"]);
    part.group.sparse = nb::cast<bool>(entries["sparse"]);
    part.rows.resize(rows.size() / sizeof(DumpRow));
    std::memcpy(part.rows.data(), rows.data(), part.rows.size() * sizeof(DumpRow));
    const nb::gil_scoped_release released;
    return index.load(holder, part);
}

Scope read_scope(nb::handle scope) {
    using OptionalText = std::optional<std::string>;
    return {nb::cast<std::string>(scope.attr("model")), nb::cast<OptionalText>(scope.attr("salt")),
            nb::cast<OptionalText>(scope.attr("lora"))};
}

// Holders from any sequence; an array of unsigned 64 bit integers is copied as it is.
std::vector<u64> holders_of(nb::handle source) {
    Py_buffer view{};
    if (PyObject_CheckBuffer(source.ptr()) == 0) return nb::cast<std::vector<u64>>(source);
    if (PyObject_GetBuffer(source.ptr(), &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
    std::vector<u64> holders;
    const bool fits = view.format != nullptr && std::string_view(view.format) == "Q";
    if (fits) holders.assign(static_cast<const u64*>(view.buf), static_cast<const u64*>(view.buf) + view.len / 8);
    PyBuffer_Release(&view);
    if (!fits) throw nb::value_error("order: a buffer, expected one of type Q");
    return holders;
}

// Select the matches that fewer than `max_rivals` holders earlier in `order` reach or exceed, in that order. `matches` is
// sorted by holder.
std::vector<Match> select_unbeaten(const std::vector<Match>& matches, const std::vector<u64>& order, std::size_t max_rivals) {
    if (max_rivals == 0) throw nb::value_error("max_rivals is 0: expected at least 1");
    if (matches.empty()) return {};
    const u64 first_holder = matches.front().holder, span = matches.back().holder - first_holder + 1;
    std::vector<const Match*> match_by_offset;  // filled where holder numbers are dense, as nearly always
    if (span <= 16 * matches.size()) {
        match_by_offset.resize(span);
        for (const Match& match : matches) match_by_offset[match.holder - first_holder] = &match;
    }
    const auto find = [&](u64 holder) -> const Match* {
        if (holder < first_holder || holder - first_holder >= span) return nullptr;
        if (!match_by_offset.empty()) return match_by_offset[holder - first_holder];
        const auto found = std::lower_bound(matches.begin(), matches.end(), holder,
                                            [](const Match& match, u64 wanted) { return match.holder < wanted; });
        return found->holder == holder ? &*found : nullptr;
    };
    std::vector<Match> unbeaten;
    std::vector<u64> longest;  // min-heap of the longest prefixes so far, at most `max_rivals`
    for (const u64 holder : order) {
        const Match* found = find(holder);
        const u64 tokens = found == nullptr ? 0 : found->pinned_tokens;
        if (longest.size() == max_rivals) {
            if (tokens <= longest.front()) continue;
            std::pop_heap(longest.begin(), longest.end(), std::greater<>());
            longest.pop_back();
        }
        longest.push_back(tokens);
        std::push_heap(longest.begin(), longest.end(), std::greater<>());
        if (found != nullptr) unbeaten.push_back(*found);
    }
    return unbeaten;
}

nb::list match(const Index& index, nb::handle token_ids, nb::handle of, nb::handle order, std::size_t max_rivals) {
    const PromptArgument prompt(token_ids);
    const Scope scope = read_scope(of);
    std::vector<Match> matches = prompt.with([&](const Tokens& tokens) { return index.match(tokens, scope); });
    if (!order.is_none()) matches = select_unbeaten(matches, holders_of(order), max_rivals);
    nb::list out;
    for (const Match& match : matches) out.append(nb::cast(match, nb::rv_policy::copy));
    return out;
}

void declare_groups(Index& index, u64 holder, nb::handle declared) {
    std::vector<Group> groups;
    for (nb::handle entries : declared) groups.push_back(read_group(entries));
    const nb::gil_scoped_release released;
    index.declare_groups(holder, groups);
}

// The index is never locked with the GIL held, nor the other way round: creating Python objects under the lock may run a
// finalizer, which passes the GIL to a thread that waits for the lock.
nb::list groups(const Index& index, u64 id) {
    std::vector<std::pair<Group, bool>> rows;
    {
        const nb::gil_scoped_release released;
        index.with_holder(id, [&](const Holder& holder) {
            for (const Group& group : holder.groups) {
                if (group.declared || group.announced) rows.emplace_back(group, holder.silent(group));
            }
        });
    }
    std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.first.key < b.first.key; });
    nb::list out;
    for (const auto& [group, silent] : rows) {
        nb::dict row = describe_group(group);
        row["blocks"] = group.names();
        row["silent"] = silent;
        out.append(row);
    }
    return out;
}

u64 held_tokens(const Index& index, u64 id) {
    const nb::gil_scoped_release released;
    u64 most = 0;
    index.with_holder(id, [&](const Holder& holder) {
        for (const Group& group : holder.groups) most = std::max(most, group.tokens());
    });
    return most;
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "The prefix index. Use router.index.make_index.";
    // Without this, a process that ends while its threads hold the index prints a page of warnings.
    nb::set_leak_warnings(false);

    nb::exception<UnknownHolder>(module, "UnknownHolder", PyExc_KeyError);

    nb::class_<Prompt>(module, "Prompt")
        .def_prop_ro("memory_bytes", &Prompt::bytes)
        .def("__len__", [](const Prompt& prompt) { return prompt.ids.size(); });

    nb::class_<Report>(module, "IngestReport")
        .def_ro("stored", &Report::stored)
        .def_ro("removed", &Report::removed)
        .def_ro("cleared", &Report::cleared)
        .def_ro("parked", &Report::parked)
        .def_ro("unknown_removals", &Report::unknown_removals)
        .def_ro("unknown_copies", &Report::unknown_copies)
        .def_ro("unknown_events", &Report::unknown_events)
        .def_ro("refused", &Report::refused)
        .def_ro("malformed_events", &Report::malformed_events)
        .def_ro("malformed", &Report::malformed);

    nb::class_<Ingesting>(module, "Ingesting")
        .def("step", [](Ingesting& ingesting) {
            const nb::gil_scoped_release released;
            return ingesting.index.step(ingesting.ingest);
        })
        .def_prop_ro("report", [](const Ingesting& ingesting) { return ingesting.ingest.report; });
    module.def("extra_work", [] { return extra_work; },
               "Search steps beyond the usual ones, of all calls of this thread; for tests.");

    module.def("most_blocks_locked", [] { return std::exchange(most_blocks_locked, 0); },
               "Most blocks that this thread changed under one lock since the last call; for tests.");

    nb::class_<Dumping>(module, "Dumping").def("step", &Dumping::step);

    nb::class_<Stats>(module, "IndexStats")
        .def_ro("holders", &Stats::holders)
        .def_ro("entries", &Stats::entries)
        .def_ro("parked", &Stats::parked)
        .def_ro("pins", &Stats::pins)
        .def_ro("memory_bytes", &Stats::bytes);

    nb::class_<Match>(module, "Match")
        .def_ro("holder", &Match::holder)
        .def_ro("tokens", &Match::tokens)
        .def_ro("gpu_tokens", &Match::gpu_tokens)
        .def_ro("pinned_tokens", &Match::pinned_tokens)
        .def_prop_ro("tier_tokens", [](const Match& match) {
            const u64* tiers = match.tier_tokens;
            return nb::make_tuple(tiers[0], tiers[1], tiers[2], tiers[3]);
        })
        .def("__repr__", [](const Match& match) {
            return "Match(holder=" + std::to_string(match.holder) + ", tokens=" + std::to_string(match.tokens) +
                   ", gpu_tokens=" + std::to_string(match.gpu_tokens) +
                   ", pinned_tokens=" + std::to_string(match.pinned_tokens) + ")";
        });

    nb::class_<Index>(module, "Index")
        .def(nb::init<u64>(), nb::arg("seed"))
        .def_prop_ro("seed", [](const Index& index) { return index.digester().seed(); })
        .def("add_holder", &Index::add_holder, nb::arg("model"), nb::call_guard<nb::gil_scoped_release>())
        .def("remove_holder", &Index::remove_holder, nb::arg("holder"), nb::call_guard<nb::gil_scoped_release>())
        .def("clear", &Index::clear, nb::arg("holder"), nb::call_guard<nb::gil_scoped_release>())
        .def("set_reannounces", &Index::set_reannounces, nb::arg("holder"), nb::arg("reannounces"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("declare_groups", &declare_groups, nb::arg("holder"), nb::arg("groups"))
        .def("ingest",
             [](Index& index, u64 holder, nb::bytes payload, double now_s) {
                 const nb::gil_scoped_release released;
                 return index.ingest(holder, static_cast<const u8*>(payload.data()), payload.size(), now_s);
             },
             nb::arg("holder"), nb::arg("payload"), nb::arg("now_s") = 0.0)
        .def("begin_ingest", [](Index& index, u64 holder, nb::bytes payload, double now_s) {
                 return new Ingesting(index, holder, payload, now_s);
             },
             nb::arg("holder"), nb::arg("payload"), nb::arg("now_s") = 0.0, nb::keep_alive<0, 1>())
        .def("prepare",
             [](const Index&, nb::handle token_ids, Prompt* similar) {
                 auto prompt = std::make_unique<Prompt>(token_ids);
                 if (similar != nullptr) prompt->resume(*similar);
                 return prompt.release();
             },
             nb::arg("token_ids"), nb::arg("similar") = nb::none())
        .def("count_common_tokens", [](const Index&, nb::handle a, nb::handle b) { return Ids(a).count_common(Ids(b)); }, nb::arg("token_ids"),
             nb::arg("others"))
        .def("match", &match, nb::arg("token_ids"), nb::arg("scope"), nb::arg("order") = nb::none(), nb::arg("max_rivals") = 1)
        .def("pin",
             [](Index& index, u64 holder, nb::handle token_ids, nb::handle of) {
                 const PromptArgument prompt(token_ids);
                 const Scope scope = read_scope(of);
                 return prompt.with([&](const Tokens& tokens) { return index.pin(holder, tokens, scope); });
             },
             nb::arg("holder"), nb::arg("token_ids"), nb::arg("scope"))
        .def("chunk_keys",
             [](const Index& index, nb::handle token_ids, nb::handle of, u64 chunk) {
                 const PromptArgument prompt(token_ids);
                 const Scope scope = read_scope(of);
                 if (chunk == 0) throw nb::value_error("chunk_tokens is 0: expected at least 1");
                 return prompt.with([&](const Tokens& tokens) { return index.chunk_keys(tokens, scope, chunk); });
             },
             nb::arg("token_ids"), nb::arg("scope"), nb::arg("chunk_tokens"))
        .def("find_lost_blocks",
             [](const Index& index, nb::handle token_ids, nb::handle of, u64 start, u64 step) -> nb::object {
                 const PromptArgument prompt(token_ids);
                 const Scope scope = read_scope(of);
                 if (step == 0) throw nb::value_error("step is 0: expected at least 1");
                 const std::optional<RemovedPrefix> removed =
                     prompt.with([&](const Tokens& tokens) { return index.find_removed(tokens, scope, start, step); });
                 if (!removed) return nb::none();
                 return nb::make_tuple(removed->end, removed->holder, removed->at_s);
             },
             nb::arg("token_ids"), nb::arg("scope"), nb::arg("start"), nb::arg("step"))
        .def("unpin", &Index::unpin, nb::arg("pin"), nb::call_guard<nb::gil_scoped_release>())
        .def("stats", &Index::stats, nb::call_guard<nb::gil_scoped_release>())
        .def("groups", &groups, nb::arg("holder"))
        .def("held_tokens", &held_tokens, nb::arg("holder"))
        .def("begin_dump", [](Index& index, u64 holder) {
                 const nb::gil_scoped_release released;
                 return new Dumping{index, index.begin_dump(holder)};
             },
             nb::arg("holder"), nb::keep_alive<0, 1>())
        .def("load", &load, nb::arg("holder"), nb::arg("part"));
}
