// The Python face of the book of turns: conversions, callbacks, sums. Called with the GIL held.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <string_view>

#include "why.hpp"

namespace nb = nanobind;
using namespace blockcast;

namespace {

// What clients send may have halves of surrogates, which UTF-8 does not.
Text text_of(nb::handle source) {
    Py_ssize_t size = 0;
    if (!PyUnicode_Check(source.ptr())) throw nb::type_error("expected a str");
    if (const char* const data = PyUnicode_AsUTF8AndSize(source.ptr(), &size)) return {data, static_cast<std::size_t>(size)};
    PyErr_Clear();
    const nb::object bytes = nb::steal(PyUnicode_AsEncodedString(source.ptr(), "utf-8", "surrogatepass"));
    if (!bytes.is_valid()) throw nb::python_error();
    return {PyBytes_AS_STRING(bytes.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr()))};
}

Name name_of(nb::handle source) { return source.is_none() ? Name() : Name(text_of(source)); }

nb::object shown(const Text& text) {
    nb::object made = nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
    if (!made.is_valid()) throw nb::python_error();
    return made;
}

nb::object shown(const Name& name) { return name ? shown(*name) : nb::none(); }
nb::object shown(double value) { return std::isnan(value) ? nb::none() : nb::object(nb::float_(value)); }
nb::object shown_place(i64 value) { return value < 0 ? nb::none() : nb::object(nb::int_(value)); }

// An array of unsigned 32 bit integers.
class Buffer : public Lent {
public:
    explicit Buffer(nb::handle source) : Lent{nullptr, 0} {
        if (PyObject_GetBuffer(source.ptr(), &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
        if (view_.itemsize != sizeof(u32) || view_.format == nullptr || *view_.format == 'f' || *view_.format == 'i') {
            PyBuffer_Release(&view_);
            throw nb::type_error("expected an array of type I");
        }
        data = static_cast<const u32*>(view_.buf);
        size = static_cast<std::size_t>(view_.len) / sizeof(u32);
    }
    ~Buffer() { PyBuffer_Release(&view_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

private:
    Py_buffer view_{};
};

Vector<u64> keys_of(nb::handle source) {
    const nb::object items = nb::steal(PySequence_Fast(source.ptr(), "keys: expected a sequence"));
    if (!items.is_valid()) throw nb::python_error();
    const std::size_t count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(items.ptr()));
    PyObject** const at = PySequence_Fast_ITEMS(items.ptr());
    Vector<u64> keys(count);
    for (std::size_t i = 0; i < count; ++i) keys[i] = PyLong_AsUnsignedLongLongMask(at[i]);
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    return keys;
}

// Requests without a salt have one and the same frozen object, so the last one is remembered.
std::shared_ptr<const Scope> scope_of(nb::handle of) {
    static nb::object& last = *new nb::object();  // never destroyed: the interpreter may be gone by then
    static std::shared_ptr<const Scope> known;
    if (last.is_valid() && last.is(of)) return known;
    const nb::object media = of.attr("media");
    const bool has_media = PyObject_IsTrue(media.ptr()) == 1;
    known = make<const Scope>(Scope{text_of(of.attr("model")), name_of(of.attr("salt")), name_of(of.attr("lora")),
                                                has_media ? text_of(nb::repr(media)) : Text()});
    last = nb::borrow(of);
    return known;
}

// The fields of a tuple, as router/turns/why.py and router/prompting/outlined.py name them: so many arguments by themselves cost more.
class Fields {
public:
    Fields(nb::handle tuple, std::size_t count) : tuple_(tuple) {
        if (!PyTuple_Check(tuple.ptr()) || static_cast<std::size_t>(PyTuple_GET_SIZE(tuple.ptr())) != count) {
            throw nb::type_error("expected a tuple, as router/turns/why.py has it");
        }
    }
    nb::handle operator[](std::size_t i) const { return PyTuple_GET_ITEM(tuple_.ptr(), static_cast<Py_ssize_t>(i)); }
    i64 number(std::size_t i) const { return nb::cast<i64>((*this)[i]); }

private:
    nb::handle tuple_;
};

// Strings that are never freed: the interpreter may be gone by then.
PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

// router/turns/ledger.py's Facts, and what makes the outline of a prompt.
class Told final : public Facts {
public:
    Told(nb::handle facts, nb::handle outline) : facts_(facts), outline_(outline) {}

    std::optional<Gone> gone(i64 start, i64 step) override {
        const nb::object found = facts_.attr("gone")(start, step);
        if (found.is_none()) return std::nullopt;
        return Gone{nb::cast<i64>(found[0]), text_of(found[1]), nb::cast<double>(found[2])};
    }
    std::optional<double> emptied(const Text& worker) override {
        const nb::object found = facts_.attr("emptied")(shown(worker));
        return found.is_none() ? std::nullopt : std::optional<double>(nb::cast<double>(found));
    }
    bool guessed(const Text& worker) override { return nb::cast<bool>(facts_.attr("guessed")(shown(worker))); }
    bool thinks(const Vector<u32>& ids) override {
        nb::list list;
        for (const u32 id : ids) list.append(id);
        return nb::cast<bool>(facts_.attr("thinks")(list));
    }
    std::optional<Drawn> outline(std::size_t after) override {
        const nb::object found = PyTuple_Check(outline_.ptr()) ? nb::borrow(outline_) : nb::object(outline_(after));
        if (found.is_none()) return std::nullopt;
        const Fields fields(found, 6);  // router/prompting/outlined.py's Outline
        Drawn drawn;
        drawn.is_whole = fields.number(0) == 0;
        Outline& made = drawn.outline;
        made.messages.own = numbers<Message>(fields[1]);
        made.tools = numbers<u32>(fields[2]);
        made.flags = nb::cast<u32>(fields[3]);
        made.messages.kept = nb::cast<std::size_t>(fields[5]);
        if (made.messages.kept == 0) return drawn;
        const nb::handle base = fields[4];
        if (!PyBytes_Check(base.ptr()) || static_cast<std::size_t>(PyBytes_GET_SIZE(base.ptr())) / sizeof(Message) < made.messages.kept) {
            throw nb::value_error("an outline: expected as many messages as are kept");
        }
        made.messages.owner = make<nb::object>(nb::borrow(base));
        made.messages.base = reinterpret_cast<const Message*>(PyBytes_AS_STRING(base.ptr()));
        return drawn;
    }

private:
    template <typename Item>
    static Vector<Item> numbers(nb::handle bytes) {
        if (!PyBytes_Check(bytes.ptr())) throw nb::type_error("an outline: expected bytes");
        Vector<Item> found(static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr())) / sizeof(Item));
        if (!found.empty()) std::memcpy(found.data(), PyBytes_AS_STRING(bytes.ptr()), found.size() * sizeof(Item));
        return found;
    }

    nb::handle facts_, outline_;
};

PyObject* reason_name(Reason reason) {
    static PyObject** const names = [] {
        auto* const made = new PyObject*[kReasons.size()];
        for (std::size_t i = 0; i < kReasons.size(); ++i) made[i] = interned(kReasons[i]);
        return made;
    }();
    return names[static_cast<std::size_t>(reason)];
}

constexpr std::array<const char*, 4> kSums = {"prompt", "best", "chosen", "reported"};

// Adds to a counter, by name, and leaves nothing behind.
template <std::size_t kCount>
void move(std::array<i64, kCount>& counts, const std::array<const char*, kCount>& names, nb::dict counter, bool zeros = false) {
    for (std::size_t i = 0; i < kCount; ++i) {
        if (counts[i] == 0 && !zeros) continue;
        const nb::str name(names[i]);
        const i64 known = counter.contains(name) ? nb::cast<i64>(counter[name]) : 0;
        counter[name] = known + counts[i];
        counts[i] = 0;
    }
}

nb::tuple told(const Why& why) {
    const Why::Sum sum = why.sum();
    nb::list parts;
    for (const Part& part : why.parts) {
        parts.append(nb::make_tuple(
            nb::borrow(reason_name(part.reason)), part.start, part.end, shown_place(part.position), shown_place(part.message),
            part.worker.empty() ? nb::none() : shown(part.worker), shown(part.ago_s), shown(part.here_s), shown(part.there_s)));
    }
    const Placed& placed = why.placed;
    return nb::make_tuple(
        shown(why.id), why.at, shown(why.session), shown(placed.worker), why.prompt,
        placed.has_better ? placed.best_cached : placed.cached, shown(placed.has_better ? placed.best_worker : placed.worker),
        placed.cached, why.reported ? nb::object(nb::int_(*why.reported)) : nb::none(), nb::borrow(reason_name(sum.reason)),
        shown_place(sum.position), sum.lost, parts, placed.attempt, why.sampled);
}

Asked asked_of(nb::handle tuple) {
    const Fields fields(tuple, 13);
    Ids ids{make<const Buffer>(fields[1]), 0, nullptr, false, nullptr};
    ids.kept = ids.base->size;
    if (!fields[2].is_none()) {
        const bool whole = fields[4].is(Py_True);
        const std::shared_ptr<const Lent> base = make<const Buffer>(fields[2]);
        const i64 kept = fields.number(3), most = static_cast<i64>(whole ? std::min(base->size, ids.kept) : base->size);
        if (kept < 0 || kept > most) throw nb::value_error("kept: expected so many ids as there are");
        ids = {base, static_cast<std::size_t>(kept), ids.base, whole, nullptr};
    }
    std::optional<u64> begins;
    if (!fields[8].is_none()) begins = nb::cast<u64>(fields[8]);
    return {text_of(fields[0]), std::move(ids), scope_of(fields[5]),
            keys_of(fields[6]), keys_of(fields[7]), begins, name_of(fields[9]), name_of(fields[10]), fields.number(11),
            fields[12].is(Py_True)};
}

Placed placed_of(nb::handle tuple) {
    const Fields fields(tuple, 7);
    const nb::handle best = fields[6];
    Placed placed{text_of(fields[0]), fields.number(1), fields.number(2), fields.number(3), nb::cast<double>(fields[4]),
                  fields.number(5), !best.is_none(), {}, 0, 0};
    if (placed.block < 1) throw nb::value_error("block: expected at least 1 token");
    if (placed.has_better) {
        placed.best_worker = text_of(best.attr("worker"));
        placed.best_cached = nb::cast<i64>(best.attr("cached_tokens"));
        placed.best_ttft_s = nb::cast<double>(best.attr("ttft_s"));
    }
    return placed;
}

// The book, the last answers to "why" and the sums by reason.
class Ledger {
public:
    Ledger(std::size_t bytes_max, double keep_s, std::size_t branches_max, std::size_t whys_max, nb::dict turns,
           nb::dict tokens, nb::dict sums)
        : book(bytes_max, keep_s, branches_max), whys_max_(whys_max), counters_{std::move(turns), std::move(tokens), std::move(sums)} {}

    std::shared_ptr<Why> explained(const Asked& asked, const Placed& placed, Facts& facts, double now, double at) const {
        return why(asked, turn_of(book, asked, facts), placed, facts, now, at);
    }

    std::shared_ptr<Why> begun(const Asked& asked, const Placed& placed, Facts& facts, double now, double at) {
        book.expire(now);
        Turn turn = turn_of(book, asked, facts);
        auto made = why(asked, turn, placed, facts, now, at);
        Vector<u64> keys;
        if (!asked.session) {
            keys = marks(asked.keys);
            if (keys.empty() && !asked.shorts.empty()) keys.push_back(asked.shorts.back());
            if (asked.begins) keys.push_back(*asked.begins);
        }
        const bool is_short = !asked.session && asked.keys.empty();
        const auto kept = make<Past>();
        made->past = kept;
        Past& past = *kept;
        past.scope = asked.scope;
        past.ids = asked.ids.lasting();
        past.outline = std::move(turn.outline);
        past.worker = placed.worker;
        past.at_s = now;
        past.session = asked.session;
        past.keys = std::move(keys);
        past.is_short = is_short;
        if (static_cast<i64>(asked.ids.size()) >= placed.block) book.put(kept, turn.past);  // of less nothing can be cached
        remember(made);
        return made;
    }

    void ended(Why& why, i64 reported, i64 answer, double now) {
        if (const auto past = why.past.lock()) {
            past->answer = answer;
            past->at_s = now;
        }
        why.past.reset();
        if (reported >= 0) why.settle(reported);
        ++turns_[place(why.sum().reason)];
        for (const Part& part : why.parts) tokens_[place(part.reason)] += part.end - part.start;
        if (why.reported) {
            const Placed& placed = why.placed;
            const i64 best = placed.has_better ? placed.best_cached : placed.cached;
            const i64 found[] = {why.prompt, best, placed.cached, *why.reported};
            for (std::size_t i = 0; i < kSums.size(); ++i) sums_[i] += found[i];
        }
        if (why.final && why.session) book.forget(*why.session);
    }

    // Adds to the counters what was counted since the last time.
    void tell() {
        move(turns_, kReasons, counters_[0]);
        move(tokens_, kReasons, counters_[1]);
        move(sums_, kSums, counters_[2], sums_[0] > 0);
    }

    std::shared_ptr<Why> get(const Text& id) const {
        const std::size_t digest = TextHash()(id);  // nobody asks often, and a table would be asked with every request
        for (auto one = whys_.rbegin(); one != whys_.rend(); ++one) {
            if (one->digest == digest && one->why->id == id) return one->why;
        }
        return nullptr;
    }
    std::size_t size() const { return whys_.size(); }

    Book book;

private:
    static std::size_t place(Reason reason) { return static_cast<std::size_t>(reason); }

    static std::shared_ptr<Why> why(const Asked& asked, const Turn& turn, const Placed& placed, Facts& facts, double now, double at) {
        auto made = make<Why>();
        made->id = asked.id;
        made->at = at;
        made->session = asked.session;
        made->placed = placed;
        made->prompt = static_cast<i64>(asked.ids.size());
        made->sampled = asked.sampled;
        made->final = asked.final;
        made->parts = parts_of(asked, turn, placed, facts, now);
        return made;
    }

    void remember(const std::shared_ptr<Why>& why) {
        whys_.push_back({TextHash()(why->id), why});
        if (whys_.size() > whys_max_) whys_.pop_front();
    }

    struct Last {
        std::size_t digest;  // of its id
        std::shared_ptr<Why> why;
    };

    std::size_t whys_max_;
    nb::dict counters_[3];
    std::array<i64, kReasons.size()> turns_{}, tokens_{};
    std::array<i64, kSums.size()> sums_{};
    std::deque<Last, Pooled<Last>> whys_;  // the oldest first
};

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "The book of turns and why they miss (C++). Use router.turns.ledger.";
    nb::set_leak_warnings(false);
    nb::list reasons;
    for (const char* const reason : kReasons) reasons.append(reason);
    module.attr("REASONS") = nb::tuple(reasons);
    nb::class_<Why>(module, "Begun")
        .def("told", &told, "The fields of router/turns/parts.py's Why, `parts` as tuples of Part's.");
    nb::class_<Ledger>(module, "Ledger")
        .def(nb::init<std::size_t, double, std::size_t, std::size_t, nb::dict, nb::dict, nb::dict>(), nb::arg("bytes_max"),
             nb::arg("keep_s"), nb::arg("branches_max"), nb::arg("whys_max"), nb::arg("turns"), nb::arg("tokens"), nb::arg("sums"))
        // By position alone: nanobind takes these at once.
        .def("explained", [](const Ledger& ledger, nb::handle asked, nb::handle placed, nb::handle facts,
                             nb::handle outline, double now, double at) {
            Told told(facts, outline);
            return ledger.explained(asked_of(asked), placed_of(placed), told, now, at);
        })
        .def("begun", [](Ledger& ledger, nb::handle asked, nb::handle placed, nb::handle facts, nb::handle outline,
                         double now, double at) {
            Told told(facts, outline);
            return ledger.begun(asked_of(asked), placed_of(placed), told, now, at);
        })
        .def("ended", &Ledger::ended)
        .def("tell", &Ledger::tell)
        .def("goes_on", [](const Ledger& ledger, nb::handle asked) {
            const Asked prompt = asked_of(asked);
            std::optional<Book::Pasts> alike;
            return ledger.book.goes_on(prompt, alike) != nullptr;
        })
        .def("get", [](const Ledger& ledger, nb::handle id) { return ledger.get(text_of(id)); }, nb::arg("id"))
        .def("outlined", [](const Ledger& ledger, nb::handle session) { return ledger.book.outlined(text_of(session)); },
             nb::arg("session"), "Messages of the session's last prompt.")
        .def("holds_together", [](const Ledger& ledger) { return ledger.book.holds_together(); })
        .def_prop_ro("prompts", [](const Ledger& ledger) { return ledger.book.size(); })
        .def_prop_ro("used_bytes", [](const Ledger& ledger) { return ledger.book.used_bytes(); })
        .def_prop_ro("shorts", [](const Ledger& ledger) { return ledger.book.shorts(); })
        .def("__len__", &Ledger::size);
}
