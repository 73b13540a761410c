#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>

#include "words.hpp"

namespace nb = nanobind;
using namespace blockcast;

namespace {

// (kind, chars 0 to 63, chars 64 to 127, least, most, wanted, branches, next), as prompts/words.py has them.
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

// Of `[` and `{`, which differ in one bit: eight bytes at a time.
std::size_t count_openings(nb::bytes text, std::size_t end) {
    const char* data = text.c_str();
    end = std::min(end, text.size());
    constexpr u64 kOnes = ~u64{0} / 255;
    std::size_t found = 0, at = 0;
    for (; at + 8 <= end; at += 8) {
        u64 piece;
        std::memcpy(&piece, data + at, 8);
        const u64 other = (piece & 0xDF * kOnes) ^ '[' * kOnes;  // a byte of zeros where there is one
        const u64 none = ((other & 0x7F * kOnes) + 0x7F * kOnes) | other;
        found += (~none >> 7 & kOnes) * kOnes >> 56;
    }
    for (; at < end; ++at) found += (data[at] & 0xDF) == '[';
    return found;
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
        std::vector<Word> words;
        words.reserve(whole.size() / 3 + 16);
        std::unordered_map<std::string_view, std::vector<u32>> asked;
        if (!divide(whole, ascii, !ask.is_none(), words)) return nb::none();
        if (!ascii && !ask.is_none() && !ask_for(whole, words, ask, asked)) return nb::none();
        std::size_t long_ones = 0;
        for (const Word& at : words) long_ones += at.kind == Word::Ascii && at.end - at.start > kWordMax ? at.end - at.start : 0;
        if (long_ones > kLongMax) return nb::none();
        Ids ids(whole.size());
        for (const Word& at : words) {
            const std::size_t count = at.end - at.start;
            if (at.kind == Word::Added) {
                ids.append(&at.id, 1);
                continue;
            }
            if (count <= kWordMax && table_.append(whole, at.start, count, ids)) continue;
            const std::string_view word = whole.substr(at.start, count);
            if (pairs_ && at.kind == Word::Ascii && count <= kWordMax) {
                const std::size_t first = ids.size();
                pairs_->append(word, ids);
                table_.add(word, ids.data() + first, ids.size() - first);
                continue;
            }
            if (at.kind == Word::Mixed && asked.find(word) == asked.end()) return nb::none();  // forgotten since
            const auto found =
                at.kind == Word::Ascii ? nb::cast<std::vector<u32>>(learn(nb::str(word.data(), word.size()))) : asked[word];
            ids.append(found.data(), found.size());
            Ids known(0);
            if (count <= kWordMax && !table_.append(whole, at.start, count, known)) {
                table_.add(word, found.data(), found.size());
            }
        }
        return nb::bytes(reinterpret_cast<const char*>(ids.data()), ids.size() * sizeof(u32));
    }

    std::size_t size() const { return table_.size(); }

private:
    static std::vector<AddedTokens::Token> tokens_of(const std::vector<Added>& added) {
        std::vector<AddedTokens::Token> tokens;
        for (const auto& [text, id] : added) tokens.push_back({text, id.value_or(0), id.has_value()});
        return tokens;
    }

    bool divide(std::string_view whole, bool ascii, bool asks, std::vector<Word>& words) const {
        for (std::size_t at = 0;;) {
            const AddedTokens::Found next = added_.find(whole, at);
            const std::string_view piece = whole.substr(at, next.start - at);
            if (!piece.empty()) {
                const bool plain = ascii || std::all_of(piece.begin(), piece.end(), [](char c) { return (c & 0x80) == 0; });
                if (!plain && (!asks || steps_.size() != 1)) return false;
                if (!(plain ? cut(steps_, piece, at, words) : cut_around(steps_[0], piece, at, words))) return false;
            }
            if (next.token == nullptr) return true;
            if (!next.token->cuts) return false;
            words.push_back(Word{next.start, next.end, Word::Added, next.token->id});
            at = next.end;
        }
    }

    // The ids of those that are not ASCII and not known; false where there are more than kAskedMax.
    bool ask_for(std::string_view whole, const std::vector<Word>& words, const nb::object& ask,
                 std::unordered_map<std::string_view, std::vector<u32>>& asked) const {
        nb::list texts;
        std::vector<std::string_view> unknown;
        for (const Word& at : words) {
            const std::string_view word = whole.substr(at.start, at.end - at.start);
            Ids known(0);
            if (at.kind != Word::Mixed || (word.size() <= kWordMax && table_.append(whole, at.start, word.size(), known))) continue;
            if (!asked.try_emplace(word).second) continue;
            if (unknown.size() == kAskedMax) return false;
            unknown.push_back(word);
            texts.append(nb::str(word.data(), word.size()));
        }
        if (unknown.empty()) return true;
        const auto found = nb::cast<std::vector<std::vector<u32>>>(ask(texts));
        if (found.size() != unknown.size()) throw nb::value_error("ask told the ids of other texts");
        for (std::size_t i = 0; i < found.size(); ++i) asked[unknown[i]] = found[i];
        return true;
    }

    static constexpr std::size_t kAskedMax = 64;  // texts: each costs the library as much as many characters
    const AddedTokens added_;
    std::vector<Pattern> steps_;
    WordTable table_;
    std::optional<BytePairs> pairs_;
};

}  // namespace

NB_MODULE(_words, module) {
    module.doc() = "Short text to ids by its words. Use prompts.words.";
    nb::set_leak_warnings(false);
    module.def("count_openings", &count_openings, nb::arg("text"), nb::arg("end") = ~std::size_t{0});
    module.def("digests", &digests, nb::arg("body"), nb::arg("first"), nb::arg("seed"), nb::arg("end") = ~std::size_t{0});
    nb::class_<Words>(module, "Words")
        .def(nb::init<const std::vector<std::vector<Row>>&, u64, std::size_t, const std::optional<Words::Pairs>&,
                      const std::vector<Words::Added>&>(),
             nb::arg("steps"), nb::arg("seed"), nb::arg("words_max"), nb::arg("pairs") = nb::none(),
             nb::arg("added") = std::vector<Words::Added>{})
        .def("encode", &Words::encode, nb::arg("text"), nb::arg("learn"), nb::arg("ask") = nb::none())
        .def("__len__", &Words::size);
}
