// What router/turns tells the book of turns, and what it is told, as Python has it: tuples, arrays, callables. Called with the
// GIL held.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <cmath>
#include <cstring>
#include <string_view>

#include "why.hpp"

namespace blockcast {

namespace nb = nanobind;

// What clients send may have halves of surrogates, which UTF-8 does not.
inline Text text_of(nb::handle source) {
    Py_ssize_t size = 0;
    if (!PyUnicode_Check(source.ptr())) throw nb::type_error("expected a str");
    if (const char* const data = PyUnicode_AsUTF8AndSize(source.ptr(), &size)) return {data, static_cast<std::size_t>(size)};
    PyErr_Clear();
    const nb::object bytes = nb::steal(PyUnicode_AsEncodedString(source.ptr(), "utf-8", "surrogatepass"));
    if (!bytes.is_valid()) throw nb::python_error();
    return {PyBytes_AS_STRING(bytes.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(bytes.ptr()))};
}

inline Name name_of(nb::handle source) { return source.is_none() ? Name() : Name(text_of(source)); }

inline nb::object shown(const Text& text) {
    nb::object made = nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass"));
    if (!made.is_valid()) throw nb::python_error();
    return made;
}

inline nb::object shown(const Name& name) { return name ? shown(*name) : nb::none(); }
inline nb::object shown(double value) { return std::isnan(value) ? nb::none() : nb::object(nb::float_(value)); }
inline nb::object shown_place(i64 value) { return value < 0 ? nb::none() : nb::object(nb::int_(value)); }

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

inline Vector<u64> keys_of(nb::handle source) {
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
inline std::shared_ptr<const Scope> scope_of(nb::handle of) {
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
    i64 number(std::size_t i) const {
        const i64 found = PyLong_AsLongLong((*this)[i].ptr());
        if (found == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
        return found;
    }

private:
    nb::handle tuple_;
};

// Strings that are never freed: the interpreter may be gone by then.
inline PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

// router/turns/ledger.py's Facts, and what makes the outline of a prompt.
class Told final : public Facts {
public:
    // `asked`: what they are about; none where they know it.
    Told(nb::handle facts, nb::handle outline, nb::handle asked = {}) : facts_(facts), outline_(outline), asked_(asked) {}

    std::optional<Gone> gone(i64 start, i64 step) override {
        const nb::object found = about().attr("gone")(start, step);
        if (found.is_none()) return std::nullopt;
        return Gone{nb::cast<i64>(found[0]), text_of(found[1]), nb::cast<double>(found[2])};
    }
    std::optional<double> emptied(const Text& worker) override {
        const nb::object found = about().attr("emptied")(shown(worker));
        return found.is_none() ? std::nullopt : std::optional<double>(nb::cast<double>(found));
    }
    bool guessed(const Text& worker) override { return nb::cast<bool>(about().attr("guessed")(shown(worker))); }
    bool thinks(const Vector<u32>& ids) override {
        nb::list list;
        for (const u32 id : ids) list.append(id);
        return nb::cast<bool>(about().attr("thinks")(list));
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

    nb::object about() const { return asked_.is_valid() ? facts_.attr("about")(asked_) : nb::borrow(facts_); }

    nb::handle facts_, outline_, asked_;
};

inline PyObject* reason_name(Reason reason) {
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

inline nb::tuple told(const Why& why) {
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

inline Asked asked_of(nb::handle tuple) {
    const Fields fields(tuple, 13);
    Ids ids{make<const Buffer>(fields[1]), 0, nullptr, false, nullptr};
    ids.kept = ids.base->size;
    if (!fields[2].is_none()) {
        const std::shared_ptr<const Lent> base = make<const Buffer>(fields[2]);
        const i64 kept = fields.number(3);
        if (kept < 0 || kept > static_cast<i64>(std::min(base->size, ids.kept))) {
            throw nb::value_error("kept: expected so many ids as there are");
        }
        ids = {base, static_cast<std::size_t>(kept), ids.base, fields[4].is(Py_True), nullptr};
    }
    std::optional<u64> begins;
    if (!fields[8].is_none()) begins = nb::cast<u64>(fields[8]);
    return {text_of(fields[0]), std::move(ids), scope_of(fields[5]),
            keys_of(fields[6]), keys_of(fields[7]), begins, name_of(fields[9]), name_of(fields[10]), fields.number(11),
            fields[12].is(Py_True)};
}

inline Placed placed_of(nb::handle tuple) {
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

}  // namespace blockcast
