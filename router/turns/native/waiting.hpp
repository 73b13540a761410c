// First bytes and ends that waited to be looked at, with others: what runs once a request is in no processor's cache, which costs
// thrice as much as the work itself. So a request's way has nothing of this: it puts what router/turns/why.py's Looked has into
// a list. Invariant: they are looked at in their order, and what one of them raises is its own.
#pragma once

#include "ledger.hpp"

namespace blockcast {

// Whom to ask and to tell.
struct Askers {
    nb::handle facts;  // router/turns/why.py's PromptFacts
    double wall_s;     // what the clock on the wall is ahead
    nb::handle log;    // (why)
};

// A list: what is asked, its outline, its body; and, behind whether it has begun, what came of it: its end if that came first, or
// why it missed. That stands there without being one of Python's values: nobody but a request's end asks for it.
class Looked {
public:
    static constexpr Py_ssize_t kAsked = 0, kOutline = 1, kBody = 2, kFound = 4, kSize = 5;

    explicit Looked(nb::handle list) : list_(list) {
        if (!PyList_Check(list.ptr()) || PyList_GET_SIZE(list.ptr()) != kSize) {
            throw nb::type_error("expected a Looked, as router/turns/why.py has it");
        }
    }
    nb::object take(Py_ssize_t at) {
        nb::object found = nb::borrow(PyList_GET_ITEM(list_.ptr(), at));
        put(at, nb::none());
        return found;
    }
    nb::handle found() const { return PyList_GET_ITEM(list_.ptr(), kFound); }
    std::shared_ptr<Why> why() const {
        PyObject* const found = this->found().ptr();
        if (!PyCapsule_IsValid(found, kName)) return nullptr;
        return *static_cast<std::shared_ptr<Why>*>(PyCapsule_GetPointer(found, kName));
    }
    void begun(const std::shared_ptr<Why>& why) {
        const auto drop = [](PyObject* held) { delete static_cast<std::shared_ptr<Why>*>(PyCapsule_GetPointer(held, kName)); };
        auto held = std::make_unique<std::shared_ptr<Why>>(why);
        const nb::object made = nb::steal(PyCapsule_New(held.get(), kName, drop));
        if (!made.is_valid()) throw nb::python_error();
        held.release();
        put(kFound, made);
    }
    void put(Py_ssize_t at, nb::handle value) { PyList_SetItem(list_.ptr(), at, value.inc_ref().ptr()); }

private:
    static constexpr const char* kName = "why";
    nb::handle list_;
};

class Waiting {
public:
    Waiting(Ledger& ledger, const Askers& askers) : ledger_(ledger), askers_(askers) {}

    // First bytes (looked, placed, when) and ends (looked, reported, answer, when, whether it is whole, whether it is logged).
    // `elsewhere`: (looked, asked, placed, when, body) of those whose conversation was changed, and whose body is to be outlined
    // as a whole; `failed`: (exception).
    void settle(nb::list waiting, nb::handle elsewhere, nb::handle failed) {
        for (std::size_t i = 0; i < waiting.size(); ++i) {
            try {
                const nb::handle one = PyList_GET_ITEM(waiting.ptr(), static_cast<Py_ssize_t>(i));
                const bool is_first = PyTuple_Check(one.ptr()) && PyTuple_GET_SIZE(one.ptr()) == kFirst;
                if (is_first) {
                    first(Fields(one, kFirst), elsewhere);
                } else {
                    end(one);
                }
            } catch (nb::python_error& error) {
                if (!error.matches(PyExc_Exception)) throw;
                failed(error.value());
            } catch (const std::exception& error) {
                failed(nb::handle(PyExc_RuntimeError)(error.what()));
            }
        }
        ledger_.tell();
    }

    void begun(nb::handle looked, nb::handle asked, nb::handle placed, double now, nb::handle outline) {
        know(Looked(looked), read(asked), asked, placed, now, outline);
        ledger_.tell();
    }

private:
    static constexpr std::size_t kFirst = 3, kEnd = 6;

    void first(const Fields& one, nb::handle elsewhere) {
        Looked looked(one[0]);
        const nb::object told = looked.take(Looked::kAsked), outline = looked.take(Looked::kOutline),
                         body = looked.take(Looked::kBody);
        const Asked asked = read(told);
        std::optional<Book::Pasts> alike;
        if (!body.is_none() && ledger_.book.goes_on(asked, alike) == nullptr) {
            elsewhere(one[0], told, one[1], one[2], body);
        } else {
            know(looked, asked, told, one[1], nb::cast<double>(one[2]), outline);
        }
    }

    // With what tells it from others, where only its first chunk's beginnings do.
    Asked read(nb::handle told) const {
        Asked asked = asked_of(told);
        if (!asked.session && (asked.keys.empty() || ledger_.book.shorts() > 0)) {
            asked.shorts = keys_of(askers_.facts.attr("shorts")(told));
        }
        return asked;
    }

    void end(nb::handle one) {
        Looked looked(Fields(one, kEnd)[0]);
        if (const auto why = looked.why()) {
            finish(why, one);
        } else {
            looked.put(Looked::kFound, one);  // its first byte failed, or is looked at elsewhere
        }
    }

    void know(Looked looked, const Asked& asked, nb::handle told, nb::handle placed, double now, nb::handle outline) {
        Told facts(askers_.facts, outline, told);
        const auto made = ledger_.begun(asked, placed_of(placed), facts, now, now + askers_.wall_s);
        const nb::object ended = nb::borrow(looked.found());
        looked.begun(made);
        if (!ended.is_none()) finish(made, ended);
    }

    void finish(const std::shared_ptr<Why>& made, nb::handle ended) {
        const Fields end(ended, kEnd);
        if (!end[4].is(Py_True)) return;
        ledger_.ended(*made, end.number(1), end.number(2), nb::cast<double>(end[3]));
        if (end[5].is(Py_True)) askers_.log(nb::cast(made));
    }

    Ledger& ledger_;
    const Askers askers_;
};

}  // namespace blockcast
