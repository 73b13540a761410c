// The last prompts of conversations: token ids and digests, no text. Owns which earlier prompt a new one goes on from: by the
// session's name, by its parent's, or, where a client names none, by the prompts that begin alike. Invariants: `used_bytes` is
// the sum of what the prompts and their bases take, each base once, at most `bytes_max`; every prompt is found from each of its
// names; the oldest goes first, and none stays longer than `keep_s`.
#pragma once

#include "outline.hpp"

namespace blockcast {

using Name = std::optional<Text>;

// router/index/protocol.py's Scope. `media`: what is mixed in at which places, as one text.
struct Scope {
    Text model;
    Name salt, lora;
    Text media;

    bool operator==(const Scope& other) const {
        return this == &other ||
               (model == other.model && salt == other.salt && lora == other.lora && media == other.media);
    }
};

// Somebody's numbers, lent for as long as this is kept.
struct Lent {
    const u32* data;
    std::size_t size;
};

// Token ids: the first `kept` ones of `base`, which many prompts share, then those of `own`, which has all of them, or their
// copies. `stays`: somebody keeps `own` anyway.
struct Ids {
    std::shared_ptr<const Lent> base;
    std::size_t kept = 0;
    std::shared_ptr<const Lent> own;
    bool stays = false;
    std::shared_ptr<const Blocks<u32>> copies;

    std::size_t rest() const { return copies ? copies->size : own ? own->size - kept : 0; }
    std::size_t size() const { return kept + rest(); }
    // Ids from this place on, so many of them side by side.
    std::pair<const u32*, std::size_t> from(std::size_t at) const {
        if (at < kept) return {base->data + at, kept - at};
        if (copies) return copies->from(at - kept);
        return {own->data + at, own->size - at};
    }
    // As they are kept for long: somebody else keeps all of them, or all that is their own is copied.
    Ids lasting() const {
        if (stays) return {own, own->size, nullptr, false, nullptr};
        if (!own) return *this;
        return {base, kept, nullptr, false, make<const Blocks<u32>>(own->data + kept, own->size - kept)};
    }
    u32 last() const { return *from(size() - 1).first; }
    // How many of the first ones are the same. What both have of one base is not looked at.
    std::size_t shared(const Ids& other) const;
};

// A prompt whose answer has begun, or that is asked about.
struct Asked {
    Text id;  // that the client knows the request by
    Ids ids;
    std::shared_ptr<const Scope> scope;
    Vector<u64> keys;        // digests of its chunks
    Vector<u64> shorts;      // of its first chunk's beginnings, where its session has no name and it, or others, need them
    std::optional<u64> begins;    // of what its user said first, where its session has no name
    Name session, parent;
    i64 sampled;                  // of its ids: as they were sampled, where the encoder would choose others
    bool final;                   // nothing comes after it
};

// A prompt that was computed, by `worker`. `keys`: by which it is found where its session has no name; `is_short`: it has
// none, and its key is that of a beginning of its first chunk.
struct Past {
    std::shared_ptr<const Scope> scope;
    Ids ids;
    std::optional<Outline> outline;
    Text worker;
    double at_s;
    Name session;
    Vector<u64> keys;
    bool is_short;
    i64 answer = 0;  // tokens generated, once that is known
    std::size_t bytes = 0;  // besides the base
    List<std::shared_ptr<Past>>::iterator place;
    bool kept = false;

    std::size_t messages() const { return outline ? outline->messages.size() : 0; }
    // Of prompt and answer, what a cache can hold: the last token was never computed.
    i64 known() const { return static_cast<i64>(ids.size()) + std::max<i64>(answer - 1, 0); }
};

class Book {
public:
    // `branches_max`: conversations that go on under one session's name, or may be gone on from.
    Book(std::size_t bytes_max, double keep_s, std::size_t branches_max)
        : bytes_max_(bytes_max), branches_max_(branches_max), keep_s_(keep_s) {}

    using Pasts = Vector<std::shared_ptr<Past>>;
    // Of a prompt whose session has no name: those that begin alike, the longest common beginning first.
    Pasts alike(const Asked& asked) const;
    // The prompt of which this one is a continuation, every token of it. `alike`: as above, here and below; looked for where
    // that is needed, and always where there is none.
    std::shared_ptr<Past> goes_on(const Asked& asked, std::optional<Pasts>& alike) const;
    struct Before {
        std::shared_ptr<Past> past;
        std::size_t common = 0;  // tokens that both begin with
    };
    // The prompt that this one most likely goes on from, where it goes on otherwise; none for what is new.
    Before before(const Asked& asked, const Pasts& alike, const std::optional<Outline>& outline) const;

    // It was computed; `instead` of the one it goes on from.
    void put(const std::shared_ptr<Past>& past, const std::shared_ptr<Past>& instead);
    void forget(const Text& session);  // it is over
    void expire(double now);
    // Messages of the session's last prompt: the next one will most likely have the same.
    std::size_t outlined(const Text& session) const;

    std::size_t size() const { return pasts_.size(); }
    std::size_t used_bytes() const { return used_bytes_; }
    // Prompts that are found by beginnings of a chunk: where there are none, nobody need ask for these.
    std::size_t shorts() const { return shorts_; }
    // Whether the invariants hold; for tests.
    bool holds_together() const;

private:
    struct Base {
        std::size_t pasts = 0, bytes = 0;  // that share it; of all its ids
    };
    void add(Pasts& found, u64 key) const;  // the prompt with that key, where it is not among them yet
    const Pasts* by_session(const Asked& asked, bool parents) const;
    void drop(const std::shared_ptr<Past>& past);

    std::size_t bytes_max_, branches_max_;
    double keep_s_;
    List<std::shared_ptr<Past>> pasts_;  // the longest unused first
    Map<Text, Pasts, TextHash> sessions_;  // the last first
    Map<u64, std::shared_ptr<Past>> keys_;
    Map<const u32*, Base> bases_;
    std::size_t used_bytes_ = 0, shorts_ = 0;
};

// The chunks by which a prompt without a session's name is found again: its last, and those at powers of two.
Vector<u64> marks(const Vector<u64>& keys);

}  // namespace blockcast
