// The PrefixIndex (router/index/protocol.py). Owns the holders, the lock and the life of pins. One writer at a
// time, any number of readers; every call is atomic.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "holder.hpp"
#include "match.hpp"
#include "pins.hpp"

namespace blockcast {

struct UnknownHolder : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct ScopeView {
    std::string_view model;
    Text salt, lora;
    std::vector<Media> media;  // ascending by position
};

// A prompt as the caller has it; `memo` where it will come again.
struct Tokens {
    const u32* data;
    std::size_t count;
    KeyMemo* memo;
};

struct Stats {
    u64 holders, entries, parked, pins, bytes, nodes;
};

// One payload on its way into a holder, slice by slice: between two slices others have their turn.
struct Ingest {
    u64 holder;
    const u8* payload;
    std::size_t size;
    double now_s = 0;
    Cursor cursor = {};
    Report report = {};
};

// A holder's content on its way out, slice by slice, as payloads of BlockDigests. Whoever takes it sees to it that the holder
// does not change meanwhile.
struct Dump {
    u64 holder, changes;
    std::size_t part = 0;
    bool done = false;
};

class Index {
public:
    explicit Index(u64 seed)
        : digester_(seed), nodes_(pages_), seats_(nodes_), boundaries_(pin_pages_), checkpoints_(pin_pages_) {}

    const Digester& digester() const { return digester_; }

    u64 add_holder(std::string name, const std::string& model);
    void remove_holder(u64 holder);
    void clear(u64 holder);
    void declare_groups(u64 holder, const std::vector<Group>& groups);
    void set_reannounces(u64 holder, bool reannounces);
    // One slice; false: it was the last one.
    bool step(Ingest& ingest);
    Report ingest(u64 holder, const u8* payload, std::size_t size, double now_s = 0);
    std::vector<Match> match(const Tokens& prompt, const ScopeView& scope) const;
    u64 pin(u64 holder, const Tokens& prompt, const ScopeView& scope);
    // Keys of the prefixes that end at the multiples of `chunk`, the whole prompt left out: its last token is always
    // computed.
    std::vector<u64> chunk_keys(const Tokens& prompt, const ScopeView& scope, u64 chunk) const;
    void unpin(u64 pin);
    // What of the prompt behind `start` was held and left last, in blocks of `step` tokens; nothing where the first of them
    // is not remembered.
    std::optional<RemovedPrefix> gone(const Tokens& prompt, const ScopeView& scope, u64 start, u64 step) const;
    Stats stats() const;

    // visit(const Holder&), under the reader's lock.
    template <class Visit>
    void with_holder(u64 holder, Visit visit) const {
        const std::shared_lock lock(mutex_);
        visit(*get(holder));
    }
    Dump begin_dump(u64 holder) const;
    // The payloads of the next slice, until it is done. Throws UnknownHolder where the holder is gone or has changed.
    std::vector<std::string> step(Dump& dump) const;

private:
    struct Pin {
        Holder* holder;
        Seat seat;  // the holder's, under which the promises stand
        u64 cut;
        std::vector<u64> boundaries;
        std::optional<u64> checkpoint;
    };

    Holder* get(u64 holder) const;
    Query query(const Tokens& prompt, const ScopeView& scope) const;
    void promise(const Pin& pin);
    void withdraw(const Pin& pin);
    void release(const Pin& pin);
    void place(const Holder* holder);
    // The holder has taken a fresh seat (it forgot its blocks): its pins go with it.
    void move_pins(const Holder& holder);

    mutable std::shared_mutex mutex_;
    // Taken before mutex_ by whoever changes holders_, a holder's names or pages_, and held while a payload is read into
    // batch_: reading looks at them and needs no exclusive lock.
    std::mutex ingest_mutex_;
    Batch batch_;

    const Digester digester_;
    Pages pages_, pin_pages_;  // before everything that lives in them
    Nodes nodes_;
    Seats seats_;
    RemovedBlocks departed_;
    Boundaries boundaries_;
    PinnedBlocks checkpoints_;
    std::map<std::string, std::unique_ptr<ModelHolders>, std::less<>> models_;
    std::unordered_map<u64, std::unique_ptr<Holder>> holders_;
    std::unordered_map<u64, Pin> pins_;
    u64 next_holder_ = 0, next_pin_ = 0;
};

}  // namespace blockcast
