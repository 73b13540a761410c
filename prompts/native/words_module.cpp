#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "words.hpp"

namespace nb = nanobind;
using namespace blockcast;

namespace {

// (kind, chars 0 to 63, chars 64 to 127, least, most, wanted, branches, next), as prompts/bpe_encoder.py has them.
using Row = std::tuple<u32, u64, u64, u64, u64, bool, std::vector<u32>, u32>;

Pattern pattern_of(const std::vector<Row>& rows) {
    std::vector<Part> parts;
    for (const auto& [kind, low, high, least, most, wanted, branches, next] : rows) {
        Part part;
        part.kind = static_cast<Part::Kind>(kind);
        for (unsigned c = 0; c < 128; ++c) part.chars[c] = (c < 64 ? low : high) >> (c & 63) & 1;
        part.least = least;
        part.most = most;
        part.wanted = wanted;
        part.branches = branches;
        part.next = next;
        bool right = kind <= Part::Look && (kind == Part::Accept) == parts.empty() && (next < parts.size() || parts.empty());
        for (const u32 branch : branches) right = right && branch < parts.size();
        right = right && (kind == Part::Either) == !branches.empty();
        right = right && (kind != Part::Look || branches.empty());
        if (!right) throw nb::value_error("a pattern's parts stand before those that lead to them; the first accepts");
        parts.push_back(part);
    }
    if (parts.empty()) throw nb::value_error("a pattern has no parts");
    return Pattern(parts);
}

// Of some bytes behind others whose digest is `before`: sixteen at a time, each multiplied into those before; every second
// sixteen by themselves, as a product takes longer than all else.
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

// Of each message router/prompting/outline.py's five numbers. Those of role and text alone, without a mark and, where the
// role's number is 0, a line that begins with the other, are made here; of the others by `other`. `roles`: role -> number, of
// others 4.
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

// Of `[` and `{`, which differ in one bit: sixteen bytes at a time, in lanes that hold up to 255.
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

// Whether both have so many bytes, and the same ones.
bool begin_alike(nb::bytes one, nb::bytes other, std::size_t length) {
    return length <= one.size() && length <= other.size() && std::memcmp(one.c_str(), other.c_str(), length) == 0;
}

// Of the beginnings of these bytes before `end` that have `first` bytes, an eighth more, two eighths ..., twice as many, an
// eighth of that more, and so on. The seed is secret. Behind the first kAll bytes a quarter of them counts: what differs
// there differs all the way.
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

// Of those digests the last ones that `among` has, `most` at most, the last first.
nb::list digests_among(nb::bytes body, std::size_t first, u64 seed, nb::dict among, std::size_t most) {
    const std::vector<u64> found = digests(body, first, seed, ~std::size_t{0});
    nb::list kept;
    for (auto digest = found.rbegin(); digest != found.rend() && kept.size() < most; ++digest) {
        const nb::object key = nb::cast(*digest);
        if (among.contains(key)) kept.append(key);
    }
    return kept;
}

class Words {
public:
    // `pairs`: (ids of characters, and of each merge by rank: left, right, what they become).
    using Pairs = std::tuple<std::vector<u32>, std::vector<u32>, std::vector<u32>, std::vector<u32>>;
    // (text, id; none where texts are not cut at it)
    using Added = std::tuple<std::string, std::optional<u32>>;
    Words(const std::vector<std::vector<Row>>& steps, u64 seed, std::size_t words_max, const std::optional<Pairs>& pairs,
          const std::vector<Added>& added)
        : added_(tokens_of(added)), table_(seed, words_max) {
        for (const std::vector<Row>& rows : steps) steps_.push_back(pattern_of(rows));
        if (steps_.empty()) throw nb::value_error("steps: expected a pattern at least");
        if (!pairs) return;
        const auto& [chars, left, right, made] = *pairs;
        if (chars.size() != 128 || left.size() != made.size() || right.size() != made.size()) {
            throw nb::value_error("pairs: expected the ids of 128 characters, and three lists of one length");
        }
        pairs_.emplace(chars, left, right, made);
    }

    // Of a text: its ids as bytes; None where a pattern matches nothing, where long words have more than kLongMax
    // characters, and where there is an added token that does not cut. `learn(word)` tells the ids of a word that is long,
    // or for which there are no pairs; `ask(texts)` of texts with other characters than ASCII: without it, and where there
    // are many, None. Under the GIL, which they may give away: the table may then be another one.
    nb::object encode(nb::str text, nb::callable learn, nb::object ask) {
        const bool ascii = PyUnicode_IS_ASCII(text.ptr()) != 0;
        const nb::object utf8 = nb::steal(ascii ? nullptr : PyUnicode_AsUTF8String(text.ptr()));  // kept in no string
        if (!ascii && !utf8.is_valid()) throw nb::python_error();
        const std::string_view whole =
            ascii ? std::string_view(static_cast<const char*>(PyUnicode_DATA(text.ptr())),
                                     static_cast<std::size_t>(PyUnicode_GET_LENGTH(text.ptr())))
                  : std::string_view(PyBytes_AS_STRING(utf8.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(utf8.ptr())));
        Ids ids(whole.size());
        std::vector<Missing> missing;
        std::size_t long_ones = 0;
        const auto make_counted = [&](std::size_t start, std::size_t size) {
            if (size > kPairsMax) long_ones += size;
            if (long_ones <= kLongMax) make(whole.substr(start, size), learn, ids);
        };
        // Words are sought a few at a time, then their ids are read in order.
        WordTable::Sought sought[kSoughtMax];
        std::size_t count = 0;
        const auto read = [&]() __attribute__((noinline)) {
            for (std::size_t i = 0; (i += table_.append(whole, sought + i, count - i, ids)) < count; ++i) {
                make_counted(sought[i].at, sought[i].size());
            }
            count = 0;
        };
        const auto plain = [&](std::size_t start, std::size_t end) __attribute__((always_inline)) {
            if (end - start <= kWordMax) {
                if (count == kSoughtMax) read();
                sought[count++] = table_.seek(whole, start, end - start);
                return;
            }
            read();
            make_counted(start, end - start);
        };
        const auto mixed = [&](std::size_t start, std::size_t end) {
            read();
            if (end - start > kWordMax || !table_.append(whole, table_.seek(whole, start, end - start), ids)) {
                missing.push_back({ids.size(), whole.substr(start, end - start)});
            }
        };
        for (std::size_t at = 0;;) {
            const AddedTokens::Found next = added_.find(whole, at);
            const std::string_view piece = whole.substr(at, next.start - at);
            if (ascii || std::all_of(piece.begin(), piece.end(), [](char c) { return (c & 0x80) == 0; })) {
                if (!cut(steps_, piece, at, plain)) return nb::none();
            } else if (ask.is_none() || steps_.size() != 1 || !cut_around(steps_[0], piece, at, plain, mixed)) {
                return nb::none();
            }
            read();
            if (long_ones > kLongMax) return nb::none();
            if (next.token == nullptr) break;
            if (!next.token->cuts) return nb::none();
            ids.append(&next.token->id, 1);
            at = next.end;
        }
        if (!missing.empty() && !put_missing(missing, ask, ids)) return nb::none();
        return nb::bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(u32));
    }

    std::size_t size() const { return table_.size(); }

private:
    static std::vector<AddedTokens::Token> tokens_of(const std::vector<Added>& added) {
        std::vector<AddedTokens::Token> tokens;
        for (const auto& [text, id] : added) tokens.push_back({text, id.value_or(0), id.has_value()});
        return tokens;
    }

    // A word that the library is to be asked for, and before which of the ids its own belong.
    struct Missing {
        std::size_t at;
        std::string_view word;
    };

    // Appends the ids of a new word of ASCII.
    [[gnu::noinline]] void make(std::string_view word, const nb::callable& learn, Ids& ids) {
        const std::size_t first = ids.size();
        if (pairs_ && word.size() <= kPairsMax) {
            pairs_->append(word, ids);
        } else {
            const auto found = nb::cast<std::vector<u32>>(learn(nb::str(word.data(), word.size())));
            ids.append(found.data(), found.size());
        }
        remember(word, ids.data() + first, ids.size() - first);
    }

    // Whoever was asked may have given the GIL away, and another thread have asked the same.
    void remember(std::string_view word, const u32* ids, std::size_t count) {
        Ids known(0);
        if (word.size() > kWordMax || table_.append(word, table_.seek(word, 0, word.size()), known)) return;
        table_.add(word, ids, count);
    }

    // Puts the ids of the missing words where they belong; false where these are more than kAskedMax.
    bool put_missing(const std::vector<Missing>& missing, const nb::object& ask, Ids& ids) {
        nb::list texts;
        std::unordered_map<std::string_view, std::size_t> numbers;
        for (const Missing& one : missing) {
            if (!numbers.try_emplace(one.word, numbers.size()).second) continue;
            if (numbers.size() > kAskedMax) return false;
            texts.append(nb::str(one.word.data(), one.word.size()));
        }
        const auto found = nb::cast<std::vector<std::vector<u32>>>(ask(texts));
        if (found.size() != numbers.size()) throw nb::value_error("ask told the ids of other texts");
        Ids all(ids.size() + missing.size());
        std::size_t done = 0;
        for (const auto& [at, word] : missing) {
            const std::vector<u32>& own = found[numbers[word]];
            all.append(ids.data() + done, at - done);
            all.append(own.data(), own.size());
            remember(word, own.data(), own.size());
            done = at;
        }
        all.append(ids.data() + done, ids.size() - done);
        ids = std::move(all);
        return true;
    }

    static constexpr std::size_t kSoughtMax = 16;
    static constexpr std::size_t kAskedMax = 64;  // texts: each costs the library as much as many characters
    const AddedTokens added_;
    std::vector<Pattern> steps_;
    WordTable table_;
    std::optional<BytePairs> pairs_;
};

}  // namespace

NB_MODULE(_words, module) {
    module.doc() = "Short text to ids by its words. Use prompts.bpe_encoder.";
    nb::set_leak_warnings(false);
    module.def("begin_alike", &begin_alike);
    module.def("digest32", [](nb::bytes data, u64 before) { return digest32(data.c_str(), data.size(), before); });
    module.def("message_words", &message_words);
    module.def("count_openings", &count_openings, nb::arg("text"), nb::arg("end") = ~std::size_t{0});
    module.def("digests", &digests, nb::arg("body"), nb::arg("first"), nb::arg("seed"), nb::arg("end") = ~std::size_t{0});
    module.def("digests_among", &digests_among, nb::arg("body"), nb::arg("first"), nb::arg("seed"), nb::arg("among"), nb::arg("most"));
    nb::class_<Words>(module, "Words")
        .def(nb::init<const std::vector<std::vector<Row>>&, u64, std::size_t, const std::optional<Words::Pairs>&,
                      const std::vector<Words::Added>&>(),
             nb::arg("steps"), nb::arg("seed"), nb::arg("words_max"), nb::arg("pairs") = nb::none(),
             nb::arg("added") = std::vector<Words::Added>{})
        .def("encode", &Words::encode, nb::arg("text"), nb::arg("learn"), nb::arg("ask") = nb::none())
        .def("__len__", &Words::size);
}
