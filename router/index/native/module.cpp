// The Python face of the native index: argument conversion, and the GIL released around the work.
// router/index/native_index.py gives it the PrefixIndex protocol.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <mutex>

#if PY_VERSION_HEX < 0x030B0000
#include <longintrepr.h>
#endif

#include "index.hpp"

namespace nb = nanobind;
using namespace blockcast;

namespace {

// Token ids of a prompt as a flat array: borrowed from bytes and arrays where possible, else copied.
class Ids {
public:
    explicit Ids(nb::handle source) {
        if (PyList_Check(source.ptr()) || PyTuple_Check(source.ptr())) {
            copy_items(source.ptr());
        } else if (PyObject_CheckBuffer(source.ptr())) {
            read_buffer(source.ptr());
        } else {
            const nb::object items = nb::steal(PySequence_List(source.ptr()));
            if (!items.is_valid()) throw nb::python_error();
            copy_items(items.ptr());
        }
    }
    Ids(const Ids&) = delete;

    const u32* data() const { return data_; }
    std::size_t size() const { return size_; }

private:
    void own() {
        data_ = owned_.data();
        size_ = owned_.size();
    }

    [[noreturn]] static void reject(std::size_t index, const std::string& value) {
        throw nb::value_error(("token_ids[" + std::to_string(index) + "] is " + value + ": expected 0 <= id < 2^32").c_str());
    }

    // Value of an int of one digit (below 2^30): every token id there is, and without a call.
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
        own();
    }

    void read_buffer(PyObject* source) {
        if (PyObject_GetBuffer(source, &borrowed_.view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) throw nb::python_error();
        const char* format = borrowed_.view.format == nullptr ? "B" : borrowed_.view.format;
        if (*format == '<' || *format == '=' || *format == '@') ++format;
        const std::size_t bytes = static_cast<std::size_t>(borrowed_.view.len);
        if (*format == 'B' || *format == 'b' || *format == 'c') {
            if (bytes % sizeof(u32) != 0) {
                throw nb::value_error(
                    ("token bytes: length " + std::to_string(bytes) + " is not a multiple of 4").c_str());
            }
            data_ = static_cast<const u32*>(borrowed_.view.buf);
            size_ = bytes / sizeof(u32);
            if (reinterpret_cast<std::uintptr_t>(data_) % alignof(u32) != 0) {
                owned_.resize(size_);
                std::memcpy(owned_.data(), borrowed_.view.buf, bytes);
                own();
            }
            return;
        }
        switch (*format) {
            case 'I': return borrow_or_convert<unsigned int>(bytes);
            case 'i': return borrow_or_convert<int>(bytes);
            case 'L': return borrow_or_convert<unsigned long>(bytes);
            case 'l': return borrow_or_convert<long>(bytes);
            case 'Q': return borrow_or_convert<unsigned long long>(bytes);
            case 'q': return borrow_or_convert<long long>(bytes);
            case 'H': return borrow_or_convert<unsigned short>(bytes);
            case 'h': return borrow_or_convert<short>(bytes);
            default: throw nb::value_error("token_ids: expected a buffer of integers");
        }
    }

    template <class Int>
    void borrow_or_convert(std::size_t bytes) {
        const Int* values = static_cast<const Int*>(borrowed_.view.buf);
        size_ = bytes / sizeof(Int);
        if constexpr (std::is_same_v<Int, unsigned int>) {
            data_ = reinterpret_cast<const u32*>(values);
        } else {
            owned_.resize(size_);
            for (std::size_t i = 0; i < size_; ++i) {
                const auto value = values[i];
                if (value < 0 || static_cast<unsigned long long>(value) >> 32 != 0) reject(i, std::to_string(value));
                owned_[i] = static_cast<u32>(value);
            }
            own();
        }
    }

    std::vector<u32> owned_;
    const u32* data_ = nullptr;
    std::size_t size_ = 0;
    // A member of its own: it is given back also where the constructor of Ids throws.
    struct Borrowed {
        Py_buffer view{};
        ~Borrowed() { PyBuffer_Release(&view); }  // does nothing where nothing was borrowed
    } borrowed_;
};

// A prompt that several calls are about. What one of them computes of it, the next ones find.
struct Prompt {
    explicit Prompt(nb::handle source) : ids(source) {}
    const Ids ids;
    std::mutex mutex;
    KeyMemo memo;  // under the mutex
};

// What a call was given: a Prompt, which it then has for itself as long as it works, or ids of any form.
class Given {
public:
    explicit Given(nb::handle source) {
        if (nb::isinstance<Prompt>(source)) {
            prompt_ = nb::cast<Prompt*>(source);
        } else {
            ids_.emplace(source);
        }
    }

    // Without the GIL: another thread may hold the prompt.
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

// A payload that is applied slice by slice.
struct Ingesting {
    Ingesting(Index& index, u64 holder, nb::bytes payload)
        : index(index), payload(payload),
          ingest{holder, static_cast<const u8*>(payload.data()), payload.size()} {}
    Index& index;
    const nb::bytes payload;
    Ingest ingest;
};

Text view(const std::optional<std::string>& text) { return text ? Text(*text) : Text(); }

ScopeView scope_view(const Index& index, const std::string& model, const std::optional<std::string>& salt,
                     const std::optional<std::string>& lora, nb::handle media) {
    ScopeView scope{model, view(salt), view(lora), {}};
    for (nb::handle item : media) {
        const std::string key = nb::cast<std::string>(item[1]);
        scope.media.push_back(Media{nb::cast<u64>(item[0]), index.digester().text({Text(key)})});
    }
    std::stable_sort(scope.media.begin(), scope.media.end(),
                     [](const Media& a, const Media& b) { return a.position < b.position; });
    return scope;
}

using DeclaredGroup = std::tuple<std::optional<std::int64_t>, std::optional<std::string>, std::optional<u64>, std::optional<u64>>;

nb::list match(const Index& index, nb::handle token_ids, const std::string& model, const std::optional<std::string>& salt,
               const std::optional<std::string>& lora, nb::handle media) {
    const Given prompt(token_ids);
    const ScopeView scope = scope_view(index, model, salt, lora, media);
    const std::vector<Match> matches = prompt.with([&](const Tokens& tokens) { return index.match(tokens, scope); });
    nb::list out;
    for (const Match& match : matches) out.append(nb::cast(match, nb::rv_policy::copy));
    return out;
}

// The lock is never taken with the GIL held, nor the other way round: whoever makes Python objects under the lock may run a
// finalizer, which gives the GIL to a thread that waits for the lock.
nb::list groups(const Index& index, u64 id) {
    struct Row {
        Group group;
        bool silent;
    };
    std::vector<Row> rows;
    {
        const nb::gil_scoped_release released;
        index.with_holder(id, [&](const Holder& holder, const Nodes&) {
            for (const Group& group : holder.groups) {
                if (group.declared || group.heard) rows.push_back(Row{group, holder.silent(group)});
            }
        });
    }
    nb::list out;
    for (const auto& [group, silent] : rows) {
        out.append(nb::make_tuple(group.key, group.kind, group.block_size, group.window, group.names(), silent,
                                  group.heard, group.sparse));
    }
    return out;
}

// [(ordinal among the heard groups, tier, (name, key, end, length, copies))]
nb::list dump_rows(const Index& index, u64 id) {
    struct Row {
        u32 slot;
        u64 name, key, end, length, copies;
    };
    std::vector<Row> rows;
    std::vector<u32> ordinals;
    {
        const nb::gil_scoped_release released;
        index.with_holder(id, [&](const Holder& holder, const Nodes& nodes) {
            u32 heard = 0;
            for (const Group& group : holder.groups) ordinals.push_back(group.heard ? heard++ : 0);
            holder.each_name([&](u64 name, u32 node, u32 slot, u32 copies) {
                rows.push_back(Row{slot, name, nodes[node].key, nodes[node].end, nodes[node].length, copies});
            });
        });
    }
    nb::list out;
    for (const Row& row : rows) {
        out.append(nb::make_tuple(ordinals[row.slot / kTiers], row.slot % kTiers,
                                  nb::make_tuple(row.name, row.key, row.end, row.length, row.copies)));
    }
    return out;
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "The native prefix index (C++). Use router.index.make_index.";
    // A process that ends while its threads still hold the index is no leak worth a page of warnings.
    nb::set_leak_warnings(false);

    nb::register_exception_translator(
        [](const std::exception_ptr& error, void*) {
            try {
                std::rethrow_exception(error);
            } catch (const UnknownHolder& unknown) {
                PyErr_SetString(PyExc_KeyError, unknown.what());
            }
        },
        nullptr);

    nb::class_<Prompt>(module, "Prompt")
        .def(nb::init<nb::handle>(), nb::arg("token_ids"),
             "Token ids that several calls are about. An array or bytes are borrowed and must not change meanwhile.")
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
               "Steps beyond those that every byte pays for, of all calls of this thread; for tests.");

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
        .def_prop_ro("fingerprint", [](const Index& index) { return index.digester().fingerprint(); })
        .def("add_holder", &Index::add_holder, nb::arg("name"), nb::arg("model"), nb::call_guard<nb::gil_scoped_release>())
        .def("remove_holder", &Index::remove_holder, nb::arg("holder"), nb::call_guard<nb::gil_scoped_release>())
        .def("clear", &Index::clear, nb::arg("holder"), nb::call_guard<nb::gil_scoped_release>())
        .def("set_reannounces", &Index::set_reannounces, nb::arg("holder"), nb::arg("reannounces"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("_declare_groups",
             [](Index& index, u64 holder, nb::handle declared) {
                 std::vector<Group> groups;
                 for (nb::handle item : declared) {
                     Group& group = groups.emplace_back();
                     group.key = nb::cast<std::optional<std::int64_t>>(item[0]);
                     group.kind = nb::cast<std::optional<std::string>>(item[1]);
                     group.block_size = nb::cast<std::optional<u64>>(item[2]);
                     group.window = nb::cast<std::optional<u64>>(item[3]);
                 }
                 const nb::gil_scoped_release released;
                 index.declare_groups(holder, groups);
             })
        .def("ingest",
             [](Index& index, u64 holder, nb::bytes payload) {
                 const nb::gil_scoped_release released;
                 return index.ingest(holder, static_cast<const u8*>(payload.data()), payload.size());
             },
             nb::arg("holder"), nb::arg("payload"))
        .def("begin", [](Index& index, u64 holder, nb::bytes payload) { return new Ingesting(index, holder, payload); },
             nb::arg("holder"), nb::arg("payload"), nb::keep_alive<0, 1>())
        .def("_match", &match)
        .def("_pin",
             [](Index& index, u64 holder, nb::handle token_ids, const std::string& model,
                const std::optional<std::string>& salt, const std::optional<std::string>& lora, nb::handle media) {
                 const Given prompt(token_ids);
                 const ScopeView scope = scope_view(index, model, salt, lora, media);
                 return prompt.with([&](const Tokens& tokens) { return index.pin(holder, tokens, scope); });
             })
        .def("_chunk_keys",
             [](const Index& index, nb::handle token_ids, const std::string& model,
                const std::optional<std::string>& salt, const std::optional<std::string>& lora, nb::handle media,
                u64 chunk) {
                 const Given prompt(token_ids);
                 const ScopeView scope = scope_view(index, model, salt, lora, media);
                 if (chunk == 0) throw nb::value_error("chunk is 0: expected at least 1");
                 return prompt.with([&](const Tokens& tokens) { return index.chunk_keys(tokens, scope, chunk); });
             })
        .def("unpin", &Index::unpin, nb::arg("pin"), nb::call_guard<nb::gil_scoped_release>())
        .def("_stats",
             [](const Index& index) {
                 const Stats stats = [&] {
                     const nb::gil_scoped_release released;
                     return index.stats();
                 }();
                 return nb::make_tuple(stats.holders, stats.entries, stats.parked, stats.pins, stats.bytes);
             })
        .def("_groups", &groups)
        .def("_dump_rows", &dump_rows);
}
