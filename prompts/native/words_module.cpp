#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

namespace nb = nanobind;

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

namespace {

constexpr u64 kGolden = 0x9E3779B97F4A7C15ull;

u64 fold(u64 a, u64 b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

// Digest of bytes that follow others with the digest `before`. Reads 16 bytes at a time into two digests by turns, because
// a product takes longer than everything else.
u32 digest32(const char* data, std::size_t size, u64 before) {
    constexpr u64 kOne = 0x9E3779B97F4A7C15ull, kTwo = 0xD1B54A32D192ED03ull;
    const auto next = [](const char* at, u64 digest) {
        u64 words[2];
        std::memcpy(words, at, sizeof(words));
        return fold(words[0] ^ kTwo, words[1] ^ digest);
    };
    u64 digest = fold(before ^ kOne, size ^ kTwo), second = digest ^ kOne;
    for (; size > 32; data += 32, size -= 32) {
        digest = next(data, digest);
        second = next(data + 16, second);
    }
    char last[32] = {};
    std::memcpy(last, data, size);
    digest = fold(next(last, digest) ^ kOne, next(last + 16, second) ^ kTwo);
    return static_cast<u32>(digest ^ digest >> 32);
}

bool has_line(std::string_view text, std::string_view line) {
    for (std::size_t at = 0; (at = text.find(line, at)) != std::string_view::npos; ++at) {
        if (at == 0 || text[at - 1] == '\n') return true;
    }
    return false;
}

// The five numbers of each message, as router/prompting/outline.py describes them. `other` makes those of a message that is
// more than a role and a text, whose text has the mark `mark`, or, if its role's number is 0, a line that begins with
// `line`. `roles` maps roles to numbers; every other role is 4.
nb::bytes message_words(nb::list messages, nb::dict roles, nb::bytes mark, nb::bytes line, nb::object other) {
    static PyObject *const kRole = PyUnicode_InternFromString("role"), *const kContent = PyUnicode_InternFromString("content");
    constexpr std::size_t kWords = 5;
    const Py_ssize_t count = PyList_GET_SIZE(messages.ptr());
    const auto found = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, count * static_cast<Py_ssize_t>(kWords * sizeof(u32))));
    if (!found.is_valid()) throw nb::python_error();
    char* place = PyBytes_AS_STRING(found.ptr());
    const auto put = [&](const u32(&words)[kWords]) {
        std::memcpy(place, words, sizeof(words));
        place += sizeof(words);
    };
    const auto plain = [&](PyObject* message) {
        if (!PyDict_CheckExact(message) || PyDict_GET_SIZE(message) != 2) return false;
        PyObject* const role = PyDict_GetItemWithError(message, kRole);
        PyObject* const content = PyDict_GetItemWithError(message, kContent);
        if (role == nullptr || content == nullptr || !PyUnicode_CheckExact(role) || !PyUnicode_CheckExact(content)) return false;
        Py_ssize_t size = 0;
        const char* const data = PyUnicode_AsUTF8AndSize(content, &size);
        if (data == nullptr) {  // half of a surrogate pair
            PyErr_Clear();
            return false;
        }
        const std::string_view text(data, static_cast<std::size_t>(size));
        PyObject* const known = PyDict_GetItemWithError(roles.ptr(), role);
        const u32 kind = known == nullptr ? 4 : static_cast<u32>(PyLong_AsLong(known));
        if (text.find(mark.c_str(), 0, mark.size()) != std::string_view::npos) return false;
        if (kind == 0 && has_line(text, {line.c_str(), line.size()})) return false;
        const u32 digest = digest32(text.data(), text.size(), 0);
        put({digest, digest, digest, kind, static_cast<u32>(PyUnicode_GET_LENGTH(content))});
        return true;
    };
    for (Py_ssize_t at = 0; at < count; ++at) {
        const nb::object message = nb::borrow(PyList_GetItem(messages.ptr(), at));
        if (!message.is_valid()) throw nb::python_error();
        if (plain(message.ptr())) continue;
        const nb::object told = other(message);
        u32 words[kWords];
        for (std::size_t i = 0; i < kWords; ++i) words[i] = nb::cast<u32>(told[i]);
        put(words);
    }
    return found;
}

// Count of `[` and `{`, which differ in one bit. Counts 16 bytes at a time, in lanes that hold up to 255.
std::size_t count_openings(nb::bytes text, std::size_t end) {
    using Lanes [[gnu::vector_size(16)]] = u8;
    const char* data = text.c_str();
    end = std::min(end, text.size());
    std::size_t found = 0, at = 0;
    while (at + sizeof(Lanes) <= end) {
        Lanes counts{};
        const std::size_t until = std::min(at + 255 * sizeof(Lanes), end);
        for (; at + sizeof(Lanes) <= until; at += sizeof(Lanes)) {
            Lanes piece;
            std::memcpy(&piece, data + at, sizeof(piece));
            counts -= reinterpret_cast<Lanes>((piece & 0xDF) == '[');
        }
        for (std::size_t lane = 0; lane < sizeof(Lanes); ++lane) found += counts[lane];
    }
    for (; at < end; ++at) found += (data[at] & 0xDF) == '[';
    return found;
}

// Digests of prefixes of a body up to `end`. The first has `first` bytes; each doubling of the length is divided into eight
// steps. The seed is secret. After the first kAll bytes only a quarter of the bytes is read, because a difference there
// usually shifts all bytes after it.
std::vector<u64> digests(nb::bytes body, std::size_t first, u64 seed, std::size_t end) {
    constexpr std::size_t kPiece = 64, kAll = 8192;
    if (first == 0 || first % (8 * kPiece) != 0) throw nb::value_error("first: expected a multiple of 512");
    const char* data = body.c_str();
    const auto word = [&](std::size_t at) {
        u64 found;
        std::memcpy(&found, data + at, sizeof(found));
        return found;
    };
    std::vector<u64> found;
    u64 lanes[] = {seed, seed ^ kGolden, ~seed, seed * kGolden};  // so that no product waits for another
    end = std::min(end, body.size());
    for (std::size_t at = 0, length = first, step = first / 8; length <= end; length += step) {
        for (; at < length; at += at < kAll ? kPiece : 4 * kPiece) {
            for (std::size_t lane = 0; lane < 4; ++lane) {
                const std::size_t here = at + 16 * lane;
                lanes[lane] += fold(word(here) ^ lanes[lane], word(here + 8) ^ seed);
            }
        }
        u64 all = length;
        for (const u64 lane : lanes) all = fold(all ^ lane, kGolden ^ seed);
        found.push_back(all);
        if (length == 16 * step) step *= 2;
    }
    return found;
}

// The `digests` of a body that are keys of `among`, at most `most`, the longest prefix first.
nb::list digests_among(nb::bytes body, std::size_t first, u64 seed, nb::dict among, std::size_t most) {
    const std::vector<u64> found = digests(body, first, seed, ~std::size_t{0});
    nb::list kept;
    for (auto digest = found.rbegin(); digest != found.rend() && kept.size() < most; ++digest) {
        const nb::object key = nb::cast(*digest);
        if (among.contains(key)) kept.append(key);
    }
    return kept;
}

}  // namespace

NB_MODULE(_words, module) {
    module.doc() = "Digests and counts of request bodies and messages. Use prompts.body_digests.";
    nb::set_leak_warnings(false);
    module.def("digest32", [](nb::bytes data, u64 before) { return digest32(data.c_str(), data.size(), before); });
    module.def("message_words", &message_words);
    module.def("count_openings", &count_openings, nb::arg("text"), nb::arg("end") = ~std::size_t{0});
    module.def("digests", &digests, nb::arg("body"), nb::arg("first"), nb::arg("seed"), nb::arg("end") = ~std::size_t{0});
    module.def("digests_among", &digests_among, nb::arg("body"), nb::arg("first"), nb::arg("seed"), nb::arg("among"), nb::arg("most"));
}
