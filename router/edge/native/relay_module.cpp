// The Python face of the stream relay. Linux only: it stands on epoll.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include "relay.hpp"

namespace nb = nanobind;
using namespace blockcast;

namespace {

nb::bytes bytes(const std::string& data) { return nb::bytes(data.data(), data.size()); }

nb::list run(Relay& relay) {
    nb::list out;
    for (const Return& one : relay.run()) {
        out.append(nb::make_tuple(one.stream, static_cast<int>(one.why), bytes(one.data)));
    }
    return out;
}

nb::object take(Relay& relay, std::uint64_t number) {
    const std::unique_ptr<Stream> stream = relay.take(number);
    if (stream == nullptr) return nb::none();
    nb::list tail;
    const std::uint64_t kept = std::min<std::uint64_t>(stream->reads, kTailReads);
    for (std::uint64_t n = stream->reads - kept; n < stream->reads; ++n) tail.append(bytes(stream->tail[n % kTailReads]));
    return nb::make_tuple(stream->left, stream->reads, stream->last_s, tail);
}

nb::bytes ids(const std::vector<std::uint32_t>& numbers) {
    return nb::bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::uint32_t));
}

nb::object seen(const Relay& relay, std::uint64_t number) {
    const Stream* const stream = relay.find(number);
    if (stream == nullptr) return nb::none();
    return nb::make_tuple(stream->reads, stream->last_s);
}

}  // namespace

NB_MODULE(_relay, module) {
    module.doc() = "Streams relayed without Python (C++). Use router.edge.relay.";
    nb::set_leak_warnings(false);
    module.attr("READ") = static_cast<int>(Given::kRead);
    module.attr("BLOCKED") = static_cast<int>(Given::kBlocked);
    module.attr("ENDED") = static_cast<int>(Given::kEnded);
    nb::class_<Tokens>(module, "Tokens")
        .def(nb::init<bool>(), nb::arg("hide"))
        .def("feed", [](Tokens& tokens, nb::bytes content) {
            std::string out;
            tokens.feed({static_cast<const char*>(content.data()), content.size()}, out);
            return bytes(out);
        }, nb::arg("content"), "The whole events that may be passed on.")
        .def("release", [](Tokens& tokens) { return bytes(tokens.release()); })
        .def("rewind", &Tokens::rewind, nb::arg("exact"))
        .def_prop_ro("prompt", [](const Tokens& tokens) { return ids(tokens.prompt); }, "Native uint32.")
        .def_prop_ro("answer", [](const Tokens& tokens) { return ids(tokens.answer); }, "Native uint32.")
        .def_prop_ro("spoken", [](const Tokens& tokens) { return tokens.spoken; })
        .def_prop_ro("last", [](const Tokens& tokens) { return bytes(tokens.last); })
        .def_prop_ro("events", [](const Tokens& tokens) { return tokens.events; })
        .def_prop_ro("odd", [](const Tokens& tokens) { return tokens.odd; })
        .def_prop_ro("parsed", [](const Tokens& tokens) { return tokens.parsed; })
        .def_prop_ro("finished", [](const Tokens& tokens) { return tokens.finished; })
        .def_prop_ro("failed", [](const Tokens& tokens) { return tokens.failed; });
    nb::class_<Relay>(module, "Relay")
        .def(nb::init<>())
        .def("fileno", &Relay::fileno)
        .def("add", &Relay::add, nb::arg("upstream"), nb::arg("client"), nb::arg("left"), nb::arg("tokens").none())
        .def("run", &run, "[(stream, READ | BLOCKED | ENDED, data)] of the streams that the caller has to take out.")
        .def("take", &take, nb::arg("stream"), "(left, reads, last_s, ends of the last reads), or None.")
        .def("seen", &seen, nb::arg("stream"), "(reads, last_s), or None.")
        .def("__len__", &Relay::size);
    module.def("find_usage", [](nb::bytes tail) -> nb::object {
        const auto usage = find_usage({static_cast<const char*>(tail.data()), tail.size()});
        return usage ? nb::object(nb::make_tuple(usage->prompt, usage->cached, usage->completion)) : nb::none();
    }, nb::arg("tail"), "(prompt, cached, completion tokens) of the last `usage` that begins there, or None.");
    module.def("follow_chunks", [](nb::bytes data, std::int64_t left) -> nb::object {
        const bool whole = follow_chunks(static_cast<const char*>(data.data()), data.size(), left);
        return whole ? nb::cast(left) : nb::none();
    });
}
