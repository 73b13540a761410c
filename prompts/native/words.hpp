// ASCII text to ids by its words: cut by regular expressions (first alternative first), looked up in a table,
// put together by byte pairs where they are new. Refuses to know Python, patterns as text, and files of tokenizers.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace blockcast {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// A part of a pattern and what comes after it.
struct Part {
    enum Kind : u32 { Accept, Set, Either, Look };
    Kind kind = Accept;
    std::array<bool, 128> chars{};  // Set: which; Look: what the next character may be
    u64 least = 1, most = 1;        // Set: how many of them, as many as can be
    bool wanted = true;             // Look: whether it has to be one of those here; the end is none
    std::vector<u32> branches;      // Either: in the order in which they are tried
    u32 next = 0;
};

// A deterministic automaton that finds what backtracking would: its states are the ways that are still open, the one that
// would be tried first in front, and what matches ends those behind it. Parts are numbered; 0 is Accept, the last one is
// where to begin. The text is ASCII.
class Pattern {
public:
    static constexpr std::size_t kNone = ~std::size_t{0};
    static constexpr std::size_t kStatesMax = 1 << 12;

    // Throws std::length_error where it takes more than kStatesMax states.
    explicit Pattern(const std::vector<Part>& parts) : parts_(parts) {
        std::map<Ways, u32> numbers{{Ways{}, kDead}};
        std::vector<Ways> states{Ways{}};
        const auto number = [&](Ways&& ways) {
            const auto [at, fresh] = numbers.try_emplace(ways, static_cast<u32>(states.size()));
            if (fresh) states.push_back(std::move(ways));
            if (states.size() > kStatesMax) throw std::length_error("a pattern with too many states");
            return at->second;
        };
        first_ = number(Ways{{static_cast<u32>(parts_.size() - 1), 0}}) * kWidth;
        std::map<std::vector<bool>, std::vector<std::size_t>> alike;  // characters that no part tells from each other
        for (std::size_t c = 0; c <= kEnd; ++c) {
            std::vector<bool> in{c == kEnd};
            for (const Part& part : parts_) in.push_back(c < kEnd && part.chars[c]);
            alike[in].push_back(c);
        }
        for (std::size_t state = 0; state < states.size(); ++state) {
            steps_.resize((state + 1) * kWidth);
            for (const auto& [in, chars] : alike) {
                Ways after;
                std::set<std::pair<u32, u64>> seen;
                bool matches = false;
                const Ways ways = states[state];
                for (const auto& [part, count] : ways) follow(part, count, chars[0], after, seen, matches);
                const u32 step = number(std::move(after)) * kWidth << 1 | u32{matches};
                for (const std::size_t c : chars) steps_[state * kWidth + c] = step;
            }
        }
        foresee();
        join();
        parts_.clear();
    }

    // Whether a word ends between two characters `a` and `b`, whatever stands before and behind, other than ASCII too.
    bool parts_between(char a, char b) const { return ends_[static_cast<u8>(a)][static_cast<u8>(b)]; }

    // The end of its match at `at`, or kNone; `at` is then behind what was looked at, behind the text if its end was.
    std::size_t match(std::string_view text, std::size_t& at) const {
        const u32* const steps = steps_.data();
        std::size_t found = kNone, i = at;
        u32 step = first_ << 1;
        for (;;) {
            if (i == text.size()) {
                at = i + 1;
                return steps[(step >> 1) + kEnd] & 1 ? i : found;
            }
            step = steps[(step >> 1) + static_cast<u8>(text[i])];
            if (step & 1) found = i;
            ++i;
            if (step >> 1 == kDead) break;
            // What is taken as the one before it: of these reads none waits for another.
            const u32* const same = steps + (step >> 1);
            const std::size_t from = i;
            while (i < text.size() && same[static_cast<u8>(text[i])] == step) ++i;
            if ((step & 1) && i > from) found = i - 1;
        }
        at = i;
        return found;
    }

    // Words of a text of ASCII: took(start, end) of each that ends before the character which it cannot take, without a branch
    // that hangs on the text. Of one that does not, as where white space is left to the next word, slow(start) takes what is to
    // be taken and tells where to go on.
    template <class Took, class Slow>
    void run(std::string_view text, const Took& took, const Slow& slow) const {
        const u32* const joined = joined_.data();
        u32 state = first_;
        for (std::size_t start = 0, i = 0; start < text.size();) {
            u32 ends[kAtOnce];
            std::size_t count = 0;
            const std::size_t from = i, stop = std::min(text.size(), i + kAtOnce);
            bool left = false;
            const char* const chars = text.data() + from;
            u32 here = 0;
            for (const u32 most = static_cast<u32>(stop - from); here < most; ++here) {
                const u32 step = joined[state + static_cast<u8>(chars[here])];
                ends[count] = here;
                count += step & kEnds;
                state = step >> 2;
                if ((left = (step & kLeft) != 0)) break;
            }
            i = from + here;
            for (std::size_t k = 0; k < count; ++k) {
                took(start, from + ends[k]);
                start = from + ends[k];
            }
            if (!left && i < text.size()) continue;
            if (!left && (steps_[state + kEnd] & 1)) {
                took(start, text.size());
                return;
            }
            start = i = slow(start);
            state = first_;
        }
    }

private:
    using Ways = std::vector<std::pair<u32, u64>>;  // (part, how many characters it has taken)
    static constexpr std::size_t kEnd = 128;        // in the place of a character: there is none
    static constexpr std::size_t kWidth = kEnd + 1;
    static constexpr u32 kDead = 0;

    // Takes the character `c` by way of this part, or matches before it. It recurses as deep as the pattern.
    void follow(u32 number, u64 count, std::size_t c, Ways& after, std::set<std::pair<u32, u64>>& seen, bool& matches) const {
        if (matches || !seen.emplace(number, count).second) return;
        const Part& part = parts_[number];
        const bool in = c < kEnd && part.chars[c];
        switch (part.kind) {
        case Part::Accept: matches = true; return;
        case Part::Set:
            if (in && count < part.most) {
                const std::pair<u32, u64> way{number, part.most < kMany ? count + 1 : std::min(count + 1, part.least)};
                if (std::find(after.begin(), after.end(), way) == after.end()) after.push_back(way);
            }
            if (count >= part.least) follow(part.next, 0, c, after, seen, matches);
            return;
        case Part::Either:
            for (const u32 branch : part.branches) follow(branch, 0, c, after, seen, matches);
            return;
        case Part::Look:
            if (in == part.wanted) follow(part.next, 0, c, after, seen, matches);
            return;
        }
    }

    // Each way on which `a` may have been taken has to end before `b`, and before the end. None where a character may be
    // left out of all words: what lies between words reaches as far as the next one.
    void foresee() {
        for (std::size_t c = 0; c < kEnd; ++c) {
            const std::size_t state = steps_[first_ + c] >> 1;
            for (std::size_t next = 0; next <= kEnd; ++next) {
                if (!(steps_[state + next] & 1)) return;
            }
        }
        const auto ends = [&](const Part& part, std::size_t c) {
            Ways after;
            std::set<std::pair<u32, u64>> seen;
            bool matches = false;
            follow(part.next, 0, c, after, seen, matches);
            return matches && after.empty();
        };
        for (std::size_t b = 0; b < kEnd; ++b) {
            std::array<bool, kEnd> end;
            end.fill(true);
            for (const Part& part : parts_) {
                if (part.kind != Part::Set) continue;
                const bool open = part.least > 1 || (part.most > 1 && part.chars[b]) || !ends(part, b) || !ends(part, kEnd);
                for (std::size_t a = 0; open && a < kEnd; ++a) end[a] = end[a] && !part.chars[a];
            }
            for (std::size_t a = 0; a < kEnd; ++a) ends_[a][b] = end[a];
        }
    }

    // What takes a character, and what takes it as the first of the next word where a word ends before it.
    void join() {
        joined_.resize(steps_.size());
        for (std::size_t at = 0; at < steps_.size(); ++at) {
            const std::size_t c = at % kWidth, state = at - c;
            const u32 step = steps_[at], next = steps_[first_ + c];
            const bool ends = step >> 1 == kDead && (step & 1) && state != first_;
            const u32 then = (ends ? next : step) >> 1;
            joined_[at] = then == kDead || c == kEnd ? kLeft : then << 2 | (ends ? kEnds : 0);
        }
    }

    static constexpr std::size_t kAtOnce = 64;
    static constexpr u32 kEnds = 1, kLeft = 2;
    static constexpr u64 kMany = u64{1} << 31;  // as in prompts/bpe_encoder.py: without an end
    std::vector<Part> parts_;   // while it is built
    std::vector<u32> joined_;   // by state and next character: four times the next state's, whether a word ends before it
    std::vector<u32> steps_;    // by state and next character: twice where the next state's begin, and whether it matches before
    u32 first_;
    std::array<std::array<bool, kEnd>, kEnd> ends_{};
};

inline u64 fold(u64 a, u64 b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

// Ids that are appended to.
class Ids {
public:
    explicit Ids(std::size_t expected) : room_(expected + kSpare), ids_(new u32[room_]) {}
    void append(const u32* ids, std::size_t count) {
        std::memcpy(spare(count), ids, count * sizeof(u32));
        count_ += count;
    }
    // Where `count` more may be written, and up to where they were.
    u32* spare(std::size_t count) {
        if (count_ + count > room_) grow(count_ + count);
        return ids_.get() + count_;
    }
    void written(const u32* end) { count_ = static_cast<std::size_t>(end - ids_.get()); }
    const u32* data() const { return ids_.get(); }
    std::size_t size() const { return count_; }

private:
    static constexpr std::size_t kSpare = 64;
    void grow(std::size_t count) {
        room_ = 2 * count;
        std::unique_ptr<u32[]> larger(new u32[room_]);
        std::memcpy(larger.get(), ids_.get(), count_ * sizeof(u32));
        ids_.swap(larger);
    }

    std::size_t room_, count_ = 0;
    std::unique_ptr<u32[]> ids_;  // not filled with anything
};

constexpr u64 kGolden = 0x9E3779B97F4A7C15ull;
constexpr std::size_t kWordMax = 128;  // longer words hardly come back; rules of dashes do, and are as long as lines
constexpr std::size_t kPairsMax = 64;  // the work for a word's pairs grows with its square
constexpr std::size_t kLongMax = 4096;  // characters of longer words in a text: the library's model holds the GIL

// What pairs of ids become, the lowest rank first.
class BytePairs {
public:
    // `chars`: the id of each ASCII character.
    BytePairs(const std::vector<u32>& chars, const std::vector<u32>& left, const std::vector<u32>& right,
              const std::vector<u32>& made)
        : chars_(chars), merges_(std::size_t{1}) {
        std::size_t size = 64;
        while (size < 2 * made.size()) size *= 2;
        merges_.assign(size, Merge{});
        for (std::size_t i = 0; i < made.size(); ++i) {  // the last one counts where a pair stands twice, as in the library
            const u64 key = pair(left[i], right[i]);
            std::size_t at = fold(key, kGolden);
            while (merge(at).rank != kNever && merge(at).key != key) ++at;
            merge(at) = Merge{key, static_cast<u32>(i), made[i]};
        }
    }

    // Appends the ids of a word of kPairsMax characters at most.
    void append(std::string_view word, Ids& ids) const {
        u32 made[kPairsMax];
        Found found[kPairsMax];  // of each id with the next one
        std::size_t count = word.size();
        for (std::size_t i = 0; i < count; ++i) made[i] = chars_[static_cast<unsigned char>(word[i])];
        const auto look = [&](std::size_t i) { found[i] = i + 1 < count ? find(pair(made[i], made[i + 1])) : Found{kNever, 0}; };
        for (std::size_t i = 0; i < count; ++i) look(i);
        while (count > 0) {
            std::size_t best = 0;
            for (std::size_t i = 1; i < count; ++i) {
                if (found[i].rank < found[best].rank) best = i;
            }
            if (found[best].rank == kNever) break;
            made[best] = found[best].made;
            --count;
            for (std::size_t i = best + 1; i < count; ++i) {
                made[i] = made[i + 1];
                found[i] = found[i + 1];
            }
            look(best);
            if (best > 0) look(best - 1);
        }
        ids.append(made, count);
    }

private:
    static constexpr u32 kNever = ~u32{0};
    struct Found {
        u32 rank, made;
    };
    struct Merge {
        u64 key = 0;
        u32 rank = kNever, made = 0;
    };
    static u64 pair(u32 left, u32 right) { return u64{left} << 32 | right; }
    Merge& merge(std::size_t at) { return merges_[at & (merges_.size() - 1)]; }
    Found find(u64 key) const {
        for (std::size_t at = fold(key, kGolden);; ++at) {
            const Merge& merge = merges_[at & (merges_.size() - 1)];
            if (merge.rank == kNever || merge.key == key) return Found{merge.rank, merge.made};
        }
    }

    std::vector<u32> chars_;
    std::vector<Merge> merges_;  // half of them empty, at least
};

// Words of kWordMax characters at most and their ids. When there are too many, all are forgotten. The seed is secret:
// clients choose the words. A short word with few ids stands in its slot: half a line of the processor's cache.
class WordTable {
public:
    WordTable(u64 seed, std::size_t words_max) : seed_(seed), words_max_(words_max) {
        draw();
        forget();
    }

    struct Key {
        u64 low, high;  // of a short word its characters, of a long one its hash; the last byte is its size
    };
    // A word at `at` of a text, of kWordMax characters at most, and where to look for it.
    struct Sought {
        std::size_t at;
        Key key;
        u64 hash;
        std::size_t size() const { return key.high >> 56; }
    };

    // Asks the processor's memory for the slot of the `size` characters of `text` at `at`: it takes as long as ten words.
    [[gnu::always_inline]] Sought seek(std::string_view text, std::size_t at, std::size_t size) const {
        const Key key = key_of(text, at, size);
        const u64 hash = hash_of(key);
        __builtin_prefetch(slots_.data() + (hash & (slots_.size() - 1)));
        return {at, key, hash};
    }

    // Appends the ids of these words up to the first that is not known: how many are.
    std::size_t append(std::string_view text, const Sought* words, std::size_t count, Ids& ids) const {
        const Slot* const slots = slots_.data();
        const std::size_t mask = slots_.size() - 1;
        u32* out = ids.spare(kCopied * count);
        std::size_t n = 0;
        for (; n < count; ++n) {
            const Key key = words[n].key;
            std::size_t i = words[n].hash & mask;
            while ((slots[i].key.low != key.low || slots[i].key.high != key.high) && slots[i].count != 0) i = (i + 1) & mask;
            const Slot& slot = slots[i];
            if (slot.count - 1 < kHere) {  // most are: to copy what is not wanted too is faster
                std::memcpy(out, &slot.ids, kCopied * sizeof(u32));
                out += slot.count;
                continue;
            }
            ids.written(out);
            if (slot.count == 0 || !is(slot, text, words[n])) return n;  // another with the same hash: as if there were none
            ids.append(ids_.data() + slot.ids_at, slot.count - kElsewhere);
            out = ids.spare(kCopied * (count - n));
        }
        ids.written(out);
        return n;
    }
    bool append(std::string_view text, const Sought& word, Ids& ids) const { return append(text, &word, 1, ids) == 1; }

    // A word that is not empty and not known, and has ids.
    void add(std::string_view word, const u32* ids, std::size_t count) {
        if (count == 0 || count >= kElsewhere) return;
        if (words_ == words_max_) forget();
        if (2 * (words_ + 1) > slots_.size()) grow();
        Slot slot{};
        slot.key = key_of(word, 0, word.size());
        slot.count = static_cast<u32>(count);
        if (word.size() <= kShort && count <= kHere) {
            std::memcpy(slot.ids, ids, count * sizeof(u32));
        } else {
            slot.count += kElsewhere;
            slot.ids_at = static_cast<u32>(ids_.size());
            slot.chars_at = static_cast<u32>(chars_.size());
            ids_.insert(ids_.end(), ids, ids + count);
            if (word.size() > kShort) chars_.append(word);
        }
        put(slot);
        ++words_;
    }

    std::size_t size() const { return words_; }

private:
    static constexpr std::size_t kShort = 15;
    static constexpr u32 kHere = 3, kCopied = 4, kElsewhere = 1 << 16;  // of ids: none has as many
    struct alignas(32) Slot {
        Key key;
        union {
            u32 ids[kHere];
            struct {
                u32 ids_at, chars_at;
            };
        };
        u32 count;  // of ids, and kElsewhere where they do not stand here; 0: the slot is empty
    };

    bool is(const Slot& slot, std::string_view text, const Sought& word) const {
        const std::size_t size = word.size();
        return size <= kShort || std::memcmp(chars_.data() + slot.chars_at, text.data() + word.at, size) == 0;
    }

    void forget() {
        slots_.assign(1024, Slot{});
        chars_.clear();
        ids_.clear();
        words_ = 0;
    }

    void put(const Slot& slot) {
        std::size_t i = hash_of(slot.key);
        while (slots_[i & (slots_.size() - 1)].count != 0) ++i;
        slots_[i & (slots_.size() - 1)] = slot;
    }

    void grow() {
        std::vector<Slot> old(2 * slots_.size(), Slot{});
        old.swap(slots_);
        for (const Slot& slot : old) {
            if (slot.count != 0) put(slot);
        }
    }

    u64 hash_of(const Key& key) const { return fold(key.low ^ seed_, key.high ^ seed_ * kGolden); }

    Key key_of(std::string_view text, std::size_t at, std::size_t size) const {
        Key key{0, 0};
        if (size > kShort) {
            key.low = seed_;
            for (std::size_t done = 0; done < size; done += 8) {
                u64 piece = 0;
                std::memcpy(&piece, text.data() + at + done, size - done < 8 ? size - done : 8);
                key.low = fold(key.low ^ piece, seed_ | 1);
            }
        } else if (text.size() - at >= sizeof(Key)) {  // to copy what is not wanted too is faster
            std::memcpy(&key, text.data() + at, sizeof(Key));
            key.low &= kept_[size].low;
            key.high &= kept_[size].high;
        } else {
            std::memcpy(&key, text.data() + at, size);
        }
        key.high |= sizes_[size];
        return key;
    }

    // By the size of a short word, the bits of its characters; by that of any, the size as a key's last byte.
    void draw() {
        u8 bytes[sizeof(Key)] = {};
        for (std::size_t size = 0; size <= kWordMax; ++size) {
            u8 last[sizeof(u64)] = {};
            last[sizeof(u64) - 1] = static_cast<u8>(size);
            std::memcpy(&sizes_[size], last, sizeof(u64));
            if (size > kShort) continue;
            std::memcpy(&kept_[size], bytes, sizeof(Key));
            bytes[size] = 0xFF;
        }
    }

    Key kept_[kShort + 1];
    u64 sizes_[kWordMax + 1];
    const u64 seed_;
    const std::size_t words_max_;
    std::vector<Slot> slots_;
    std::string chars_;
    std::vector<u32> ids_;
    std::size_t words_ = 0;
};

// Tokens that are sought as they are written: the first that begins, the longest that begins there.
class AddedTokens {
public:
    struct Token {
        std::string text;
        u32 id;
        bool cuts;  // what stands before and behind it is encoded for itself
    };
    struct Found {
        std::size_t start, end;  // of none: behind the text
        const Token* token;
    };

    explicit AddedTokens(std::vector<Token> tokens) : tokens_(std::move(tokens)), ends_(1) {
        for (const Token& token : tokens_) {
            if (token.text.empty()) throw std::invalid_argument("an added token without text");
            u32 node = 0;
            for (const char c : token.text) {
                const auto [at, fresh] = nodes_.try_emplace(key(node, c), static_cast<u32>(ends_.size()));
                if (fresh) ends_.push_back(nullptr);
                node = at->second;
            }
            ends_[node] = &token;
            begins_[static_cast<u8>(token.text[0])] = true;
        }
        const auto first = std::find(begins_.begin(), begins_.end(), true);
        if (std::count(begins_.begin(), begins_.end(), true) == 1) only_ = static_cast<int>(first - begins_.begin());
    }
    AddedTokens(const AddedTokens&) = delete;
    AddedTokens& operator=(const AddedTokens&) = delete;

    // From `at` on.
    Found find(std::string_view text, std::size_t at) const {
        for (;; ++at) {
            if (only_) {
                at = std::min(text.find(static_cast<char>(*only_), at), text.size());
            } else {
                while (at < text.size() && !begins_[static_cast<u8>(text[at])]) ++at;
            }
            Found found{at, at, nullptr};
            if (at == text.size()) return found;
            u32 node = 0;
            for (std::size_t i = at; i < text.size(); ++i) {
                const auto next = nodes_.find(key(node, text[i]));
                if (next == nodes_.end()) break;
                node = next->second;
                if (ends_[node] != nullptr) found = Found{at, i + 1, ends_[node]};
            }
            if (found.token != nullptr) return found;
        }
    }

private:
    static u64 key(u32 node, char c) { return u64{node} << 8 | static_cast<u8>(c); }
    const std::vector<Token> tokens_;
    std::unordered_map<u64, u32> nodes_;  // (beginning of a token, its next character) -> a longer beginning
    std::vector<const Token*> ends_;      // by beginning: the token that it is
    std::array<bool, 256> begins_{};
    std::optional<int> only_;  // the character with which all of them begin
};

// Words of a text that stands at `offset` of the whole, by one pattern: take(start, end) of what it matches and of what lies
// between. False where it matches nothing at some place: engines go on differently behind an empty match.
template <class Take>
bool cut_by(const Pattern& pattern, std::string_view text, std::size_t offset, const Take& take) {
    std::size_t at = 0;  // behind what was taken
    bool all = true;
    const auto took = [&](std::size_t start, std::size_t end) __attribute__((always_inline)) {
        if (at < start) take(offset + at, offset + start);
        take(offset + start, offset + end);
        at = end;
    };
    const auto slow = [&](std::size_t start) {
        std::size_t behind = start;
        const std::size_t end = pattern.match(text, behind);
        if (end == Pattern::kNone) return start + 1;
        if (end > start) took(start, end);
        all = end > start;
        return all ? end : text.size();
    };
    pattern.run(text, took, slow);
    if (all && at < text.size()) take(offset + at, offset + text.size());
    return all;
}

// By all patterns from number `first` on: a word of one is cut by the next one, which looks neither beyond it nor back.
template <class Take>
bool cut(const std::vector<Pattern>& patterns, std::string_view text, std::size_t offset, const Take& take, std::size_t first = 0) {
    if (first + 1 == patterns.size()) return cut_by(patterns[first], text, offset, take);
    bool all = true;
    return cut_by(patterns[first], text, 0, [&](std::size_t start, std::size_t end) {
        all = all && cut(patterns, text.substr(start, end - start), offset + start, take, first + 1);
    }) && all;
}

// The same of UTF-8 by one pattern: words of ASCII, and mixed(start, end) of what lies between them and is to be encoded by the
// library, from the word that other characters may belong to until where a word surely ends. What stands beside such a character may become one
// with it. False as above, and where there would be nothing but the latter.
template <class Take, class Other>
bool cut_around(const Pattern& pattern, std::string_view text, std::size_t offset, const Take& take, const Other& mixed) {
    const auto is_ascii = [&](std::size_t i) { return i >= text.size() || static_cast<u8>(text[i]) < 0x80; };
    std::size_t at = 0;
    while (at < text.size()) {
        std::size_t other = at;
        while (other < text.size() && is_ascii(other)) ++other;
        const bool last = other == text.size();
        const std::string_view sure = text.substr(0, last || other == at ? other : other - 1);
        while (at < sure.size()) {
            std::size_t behind = at;
            const std::size_t end = pattern.match(sure, behind);
            if (!last && behind > sure.size()) break;
            if (end == at || end == Pattern::kNone) return false;
            take(offset + at, offset + end);
            at = end;
        }
        if (last) break;
        std::size_t end = other + 1;
        while (end < text.size() && !(is_ascii(end - 1) && is_ascii(end) && is_ascii(end + 1) &&
                                      pattern.parts_between(text[end - 1], text[end]))) {
            ++end;
        }
        if (at == 0 && end == text.size()) return false;
        mixed(offset + at, offset + end);
        at = end;
    }
    return true;
}

}  // namespace blockcast
