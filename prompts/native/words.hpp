// ASCII text to ids by its words: cut by regular expressions (backtracking, first alternative first), looked up in a table,
// put together by byte pairs where they are new. Refuses to know Python, patterns as text, and files of tokenizers.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace blockcast {

using u32 = std::uint32_t;
using u64 = std::uint64_t;

// A part of a pattern and what comes after it.
struct Part {
    enum Kind : u32 { Accept, Set, Either, Look };
    Kind kind = Accept;
    u64 chars[2] = {0, 0};         // Set: which
    u64 least = 1, most = 1;       // Set: how many of them, as many as can be
    bool wanted = true;            // Look: whether it has to match here
    std::vector<u32> branches;     // Either: in the order in which they are tried; Look: what is looked for
    u32 next = 0;
    bool has(unsigned char c) const { return chars[c >> 6 & 1] >> (c & 63) & 1; }
};

// Parts are numbered; 0 is Accept, the last one is where to begin. It recurses as deep as the pattern, not the text.
class Pattern {
public:
    static constexpr std::size_t kNone = ~std::size_t{0};
    explicit Pattern(std::vector<Part> parts) : parts_(std::move(parts)) {}

    // The end of its match at `at`, or kNone.
    std::size_t match(std::string_view text, std::size_t at) const {
        return run(text, static_cast<u32>(parts_.size() - 1), at);
    }

private:
    std::size_t run(std::string_view text, u32 number, std::size_t at) const {
        for (;;) {
            const Part& part = parts_[number];
            switch (part.kind) {
            case Part::Accept: return at;
            case Part::Set: {
                const std::size_t stop = part.most < text.size() - at ? at + part.most : text.size();
                std::size_t end = at;
                while (end < stop && part.has(static_cast<unsigned char>(text[end]))) ++end;
                if (end - at < part.least) return kNone;
                const std::size_t first = at + part.least;
                if (parts_[part.next].kind != Part::Accept) {
                    for (; end > first; --end) {
                        if (const std::size_t found = run(text, part.next, end); found != kNone) return found;
                    }
                }
                at = end;
                break;
            }
            case Part::Either:
                for (std::size_t i = 0; i + 1 < part.branches.size(); ++i) {
                    if (const std::size_t found = run(text, part.branches[i], at); found != kNone) return found;
                }
                number = part.branches.back();
                continue;
            case Part::Look:
                if ((run(text, part.branches[0], at) != kNone) != part.wanted) return kNone;
                break;
            }
            number = part.next;
        }
    }

    std::vector<Part> parts_;
};

// What pairs of ids become, the lowest rank first.
class BytePairs {
public:
    // `chars`: the id of each ASCII character.
    BytePairs(const std::vector<u32>& chars, const std::vector<u32>& left, const std::vector<u32>& right,
              const std::vector<u32>& made)
        : chars_(chars) {
        merges_.reserve(made.size());
        for (std::size_t i = 0; i < made.size(); ++i) {  // the last one counts where a pair stands twice, as in the library
            merges_[pair(left[i], right[i])] = Merge{static_cast<u32>(i), made[i]};
        }
    }

    // Appends the ids of a short word: the work grows with its square.
    void append(std::string_view word, std::vector<u32>& ids) const {
        const std::size_t first = ids.size();
        for (const char c : word) ids.push_back(chars_[static_cast<unsigned char>(c)]);
        std::vector<Merge> found(word.size());  // of each id with the next one
        const auto look = [&](std::size_t i) {
            found[i] = Merge{};
            if (first + i + 1 >= ids.size()) return;
            const auto merge = merges_.find(pair(ids[first + i], ids[first + i + 1]));
            if (merge != merges_.end()) found[i] = merge->second;
        };
        for (std::size_t i = 0; i < word.size(); ++i) look(i);
        for (std::size_t count = word.size();; --count) {
            std::size_t best = 0;
            for (std::size_t i = 1; i < count; ++i) {
                if (found[i].rank < found[best].rank) best = i;
            }
            if (found[best].rank == kNever) return;
            ids[first + best] = found[best].made;
            ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(first + best + 1));
            found.erase(found.begin() + static_cast<std::ptrdiff_t>(best + 1));
            look(best);
            if (best > 0) look(best - 1);
        }
    }

private:
    static constexpr u32 kNever = ~u32{0};
    struct Merge {
        u32 rank = kNever, made = 0;
    };
    static u64 pair(u32 left, u32 right) { return u64{left} << 32 | right; }

    std::vector<u32> chars_;
    std::unordered_map<u64, Merge> merges_;
};

// Words and their ids. When there are too many, all are forgotten. The seed is secret: clients choose the words.
class WordTable {
public:
    WordTable(u64 seed, std::size_t words_max) : seed_(seed), words_max_(words_max) { forget(); }

    // Appends the ids of a word; false where it is not known.
    bool append(std::string_view word, std::vector<u32>& ids) const {
        const u64 hash = hash_of(word);
        for (std::size_t i = hash;; ++i) {
            const Slot& slot = slots_[i & (slots_.size() - 1)];
            if (slot.size == 0) return false;
            if (slot.hash != hash || slot.size != word.size()) continue;
            if (std::memcmp(chars_.data() + slot.at, word.data(), word.size()) != 0) continue;
            ids.insert(ids.end(), ids_.begin() + slot.ids_at, ids_.begin() + slot.ids_at + slot.ids_count);
            return true;
        }
    }

    // A word that is not empty and not known.
    void add(std::string_view word, const u32* ids, std::size_t count) {
        if (words_ == words_max_) forget();
        if (2 * (words_ + 1) > slots_.size()) grow();
        const u64 hash = hash_of(word);
        put(Slot{hash, static_cast<u32>(chars_.size()), static_cast<u32>(word.size()), static_cast<u32>(ids_.size()),
                 static_cast<u32>(count)});
        chars_.append(word);
        ids_.insert(ids_.end(), ids, ids + count);
        ++words_;
    }

    std::size_t size() const { return words_; }

private:
    struct Slot {
        u64 hash;
        u32 at, size, ids_at, ids_count;
    };

    void forget() {
        slots_.assign(1024, Slot{});
        chars_.clear();
        ids_.clear();
        words_ = 0;
    }

    void put(const Slot& slot) {
        std::size_t i = slot.hash;
        while (slots_[i & (slots_.size() - 1)].size != 0) ++i;
        slots_[i & (slots_.size() - 1)] = slot;
    }

    void grow() {
        std::vector<Slot> old(2 * slots_.size(), Slot{});
        old.swap(slots_);
        for (const Slot& slot : old) {
            if (slot.size != 0) put(slot);
        }
    }

    static u64 fold(u64 a, u64 b) {
        const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
        return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
    }

    u64 hash_of(std::string_view word) const {
        u64 hash = seed_ ^ word.size();
        for (std::size_t at = 0; at < word.size(); at += 8) {
            u64 piece = 0;
            std::memcpy(&piece, word.data() + at, word.size() - at < 8 ? word.size() - at : 8);
            hash = fold(hash ^ piece, seed_ | 1);
        }
        return fold(hash, 0x9E3779B97F4A7C15ull);
    }

    const u64 seed_;
    const std::size_t words_max_;
    std::vector<Slot> slots_;
    std::string chars_;
    std::vector<u32> ids_;
    std::size_t words_ = 0;
};

struct Word {
    std::size_t start, end;
};

// All of a text: what the first pattern matches and what lies between is cut by the next one. False where a pattern
// matches nothing at some place: engines go on differently behind an empty match.
inline bool cut(const std::vector<Pattern>& patterns, std::string_view text, std::vector<Word>& words) {
    words.assign(text.empty() ? 0 : 1, Word{0, text.size()});
    std::vector<Word> pieces;
    for (const Pattern& pattern : patterns) {
        pieces.swap(words);
        words.clear();
        for (const Word& piece : pieces) {
            const std::string_view part = text.substr(0, piece.end);  // nobody looks beyond, nor back
            const std::string_view own = part.substr(piece.start);
            std::size_t gap = 0, at = 0;
            while (at < own.size()) {
                const std::size_t end = pattern.match(own, at);
                if (end == at) return false;
                if (end == Pattern::kNone) {
                    ++at;
                    continue;
                }
                if (gap < at) words.push_back(Word{piece.start + gap, piece.start + at});
                words.push_back(Word{piece.start + at, piece.start + end});
                gap = at = end;
            }
            if (gap < own.size()) words.push_back(Word{piece.start + gap, piece.end});
        }
    }
    return true;
}

}  // namespace blockcast
