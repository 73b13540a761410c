// Fuzzes how short texts become ids (prompts/native/words.hpp): texts of what real patterns are about, mutated and long. A
// program of its own, so that AddressSanitizer and UBSan see nothing but our code. Built and run by scripts/fuzz.
//
//     fuzz_words PATTERNS SECONDS SEED
//
// PATTERNS has the patterns of tokenizers as prompts/bpe_encoder.py makes them: for each tokenizer how many, for each of those how
// many parts, then the parts: kind, characters (two numbers), least, most, wanted, how many branches, the branches, next.
//
// Besides what the sanitizers catch: words are the whole text, in order, one match after the other; pairs make of a word what a naive search makes of it;
// what is remembered is what was learned; no text costs more work than it pays for.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>

#include "fuzz_work.hpp"
#include "words.hpp"

using namespace blockcast;

namespace {

constexpr unsigned long long kSteps = 20'000, kStepsPerByte = 200;
constexpr u32 kCharacters = 128;

const char* const pieces[] = {
    "a", "A", " ", "  ", "\n", "\r\n", "\t", "1", "12345", "'s", "'LL", "'", "_", ".", "...", "!?", "/", "Abc", "aB", "HTTP", "\x7f", "\v", "x1", " '", "-",
};

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "fuzz_words: %s\n", what);
    std::abort();
}

using Steps = std::vector<Pattern>;

std::vector<Steps> read_patterns(const char* path) {
    std::ifstream file(path);
    std::vector<Steps> all;
    for (u64 patterns; file >> patterns;) {
        Steps& steps = all.emplace_back();
        for (; patterns > 0; --patterns) {
            u64 count, kind, low, high, wanted, branches;
            std::vector<Part> parts;
            for (file >> count; count > 0; --count) {
                Part& part = parts.emplace_back();
                file >> kind >> low >> high >> part.least >> part.most >> wanted >> branches;
                part.kind = static_cast<Part::Kind>(kind);
                part.wanted = wanted != 0;
                for (u32 c = 0; c < kCharacters; ++c) part.chars[c] = (c < 64 ? low : high) >> (c & 63) & 1;
                part.branches.resize(branches);
                for (u32& branch : part.branches) file >> branch;
                file >> part.next;
            }
            steps.emplace_back(parts);
        }
    }
    expect(!all.empty(), "there are no patterns");
    return all;
}

struct Word {
    std::size_t start, end;
    bool mixed = false;
};

class Fuzzer {
public:
    Fuzzer(std::uint64_t seed, const std::vector<Steps>& patterns)
        : random_(seed), steps_(patterns[below(patterns.size())]), table_(random_(), 1 + below(600)) {
        std::vector<u32> chars, left, right, made;
        for (u32 c = 0; c < kCharacters; ++c) chars.push_back(c);
        for (u32 id = kCharacters, count = static_cast<u32>(below(300)); count > 0; --count, ++id) {
            left.push_back(below(2) ? 'a' + static_cast<u32>(below(3)) : static_cast<u32>(below(id)));
            right.push_back(below(2) ? 'a' + static_cast<u32>(below(3)) : static_cast<u32>(below(id)));
            made.push_back(id);
            merges_[{left.back(), right.back()}] = {made.size() - 1, id};
        }
        pairs_.emplace_back(chars, left, right, made);
    }

    void text() {
        const std::string text = make();
        std::vector<Word> words;
        const auto before = work;
        const bool all = cut(steps_, text, 0, [&](std::size_t start, std::size_t end) { words.push_back({start, end}); });
        Ids ids(text.size());
        std::size_t at = 0, count = 0;
        for (const Word& word : words) {
            if (!all) break;
            expect(word.start == at && word.end > at, "words are not the text");
            at = word.end;
            const std::size_t size = word.end - word.start, first = ids.size();
            if (size > kWordMax || table_.append(text, table_.seek(text, word.start, size), ids)) continue;
            learn(text.substr(word.start, size), ids);
            table_.add(std::string_view(text).substr(word.start, size), ids.data() + first, ids.size() - first);
            ++count;
        }
        const auto steps = work - before;
        if (steps > kSteps + kStepsPerByte * (text.size() + 64 * count)) {
            std::fprintf(stderr, "fuzz_words: %zu bytes cost %llu steps: %.80s\n", text.size(), steps, text.c_str());
            std::abort();
        }
        expect(!all || at == text.size(), "words end before the text");
        if (all) check(text, words);
        if (all && steps_.size() == 1) expect(ends_of(words) == matches(text), "words are not one match after the other");
    }

    // The same with other characters among it: what is left to the library begins and ends beside ASCII.
    void mixed() {
        static const char* const others[] = {"\u00e9", "e\u0301", "\u2019", "\u4e00", "\U0001f44d", "\u00a0"};
        std::string text;
        for (const char c : make()) {
            text += c;
            if (below(7) == 0) text += others[below(std::size(others))];
        }
        std::vector<Word> words;
        const auto before = work;
        const bool all = cut_around(
            steps_[0], text, 0, [&](std::size_t start, std::size_t end) { words.push_back({start, end}); },
            [&](std::size_t start, std::size_t end) { words.push_back({start, end, true}); });
        expect(work - before <= kSteps + kStepsPerByte * text.size(), "a mixed text costs too many steps");
        if (!all) return;
        const auto other = [](char c) { return (c & 0x80) != 0; };
        std::size_t at = 0;
        for (const Word& word : words) {
            expect(word.start == at && word.end > at && word.end <= text.size(), "pieces are not the text");
            const std::string piece = text.substr(word.start, word.end - word.start);
            expect(word.mixed != std::none_of(piece.begin(), piece.end(), other), "a piece is of the wrong kind");
            expect(word.end == text.size() || !other(text[word.end]), "a piece ends before another character");
            at = word.end;
        }
        expect(at == text.size(), "pieces end before the text");
    }

private:
    static std::vector<std::size_t> ends_of(const std::vector<Word>& words) {
        std::vector<std::size_t> ends;
        for (const Word& word : words) ends.push_back(word.end);
        return ends;
    }

    // Where the matches of the only pattern end, and what lies between them.
    std::vector<std::size_t> matches(const std::string& text) const {
        std::vector<std::size_t> ends;
        for (std::size_t at = 0, gap = 0; at < text.size();) {
            std::size_t behind = at;
            const std::size_t end = steps_[0].match(text, behind);
            if (end != Pattern::kNone && gap < at) ends.push_back(at);
            if (end != Pattern::kNone) ends.push_back(gap = end);
            at = end == Pattern::kNone ? at + 1 : end;
            if (at == text.size() && gap < at) ends.push_back(at);
        }
        return ends;
    }

    // Each word again, by the table and by pairs.
    void check(const std::string& text, const std::vector<Word>& words) {
        for (std::size_t i = 0; i < words.size(); i += 1 + below(1 + words.size() / 8)) {
            const std::string word = text.substr(words[i].start, words[i].end - words[i].start);
            if (word.size() > kWordMax) continue;
            Ids known(1), made(1);
            learn(word, made);
            const std::vector<u32> ids(made.data(), made.data() + made.size());
            expect(word.size() > kPairsMax || ids == naive(word), "pairs make other ids than a naive search");
            if (!table_.append(text, table_.seek(text, words[i].start, word.size()), known)) continue;
            expect(ids == std::vector<u32>(known.data(), known.data() + known.size()), "other ids are remembered than were learned");
        }
    }

    // Of a long word those of its characters: what a library would say.
    void learn(const std::string& word, Ids& ids) const {
        if (word.size() <= kPairsMax) return pairs_[0].append(word, ids);
        for (const char c : word) {
            const u32 id = static_cast<u32>(c);
            ids.append(&id, 1);
        }
    }

    std::vector<u32> naive(const std::string& word) const {
        std::vector<u32> ids(word.begin(), word.end());
        for (;;) {
            std::size_t best = ids.size(), rank = ~std::size_t{0};
            for (std::size_t i = 0; i + 1 < ids.size(); ++i) {
                const auto found = merges_.find({ids[i], ids[i + 1]});
                if (found != merges_.end() && found->second.first < rank) best = i, rank = found->second.first;
            }
            if (best == ids.size()) return ids;
            ids[best] = merges_.at({ids[best], ids[best + 1]}).second;
            ids.erase(ids.begin() + static_cast<long>(best) + 1);
        }
    }

    std::uint64_t below(std::uint64_t bound) { return random_() % bound; }

    // Mostly short; sometimes a piece a thousand times over, where quadratic work would show.
    std::string make() {
        std::string made;
        for (std::uint64_t count = below(40); count > 0; --count) {
            const std::string piece = below(4) == 0 ? std::string(1, static_cast<char>(below(kCharacters))) : pieces[below(std::size(pieces))];
            for (std::uint64_t times = below(100) == 0 ? 1'000 + below(10'000) : 1 + below(3); times > 0; --times) made += piece;
        }
        return made;
    }

    std::mt19937_64 random_;
    const Steps& steps_;
    WordTable table_;
    std::map<std::pair<u32, u32>, std::pair<std::size_t, u32>> merges_;  // (left, right) -> (rank, what they become)
    std::vector<BytePairs> pairs_;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: fuzz_words PATTERNS SECONDS SEED\n");
        return 2;
    }
    const std::vector<Steps> patterns = read_patterns(argv[1]);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(argv[2]));
    std::uint64_t inputs = 0;
    for (std::uint64_t seed = std::strtoull(argv[3], nullptr, 10); std::chrono::steady_clock::now() < deadline; ++seed) {
        Fuzzer fuzzer(seed, patterns);
        for (int i = 0; i < 50; ++i, ++inputs) {
            fuzzer.text();
            fuzzer.mixed();
        }
    }
    std::printf("fuzz_words: %llu texts, nothing wrong\n", static_cast<unsigned long long>(inputs));
    return 0;
}
