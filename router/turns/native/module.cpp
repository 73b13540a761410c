// The Python face of the book of turns. Called with the GIL held.
#include "waiting.hpp"

using namespace blockcast;

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
        .def("settle", [](Ledger& ledger, nb::list waiting, nb::handle facts, double wall_s, nb::handle elsewhere,
                          nb::handle log, nb::handle failed) {
            Waiting(ledger, {facts, wall_s, log}).settle(std::move(waiting), elsewhere, failed);
        })
        .def("begun_elsewhere", [](Ledger& ledger, nb::handle looked, nb::handle asked, nb::handle placed, double now,
                                   nb::handle outline, nb::handle facts, double wall_s, nb::handle log) {
            Waiting(ledger, {facts, wall_s, log}).begun(looked, asked, placed, now, outline);
        })
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
