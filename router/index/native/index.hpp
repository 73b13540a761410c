// The PrefixIndex (router/index/protocol.py). It owns the holders, the locks and the pins. There is one writer at a time and
// any number of readers; every call is atomic but those that change more than kBlocksPerLock blocks.
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

// protocol.py's Scope.
struct Scope {
    std::string model;
    std::optional<std::string> salt, lora;
};

// Token ids of a prompt, borrowed from the caller. `memo` is set for a prompt of several calls.
struct Tokens {
    const u32* data;
    std::size_t count;
    KeyMemo* memo;
};

struct Stats {
    u64 holders, entries, parked, pins, bytes, nodes;
};

// One payload that is applied to a holder in slices, between which other calls can run.
struct Ingest {
    u64 holder;
    const u8* payload;
    std::size_t size;
    double now_s = 0;
    Cursor cursor = {};
    Report report = {};
};

// Dump of a holder's blocks in slices. The holder must not change meanwhile.
struct Dump {
    u64 holder, changes;
    std::size_t part = 0;
    bool done = false;
};

class Index {
public:
    explicit Index(u64 seed)
        : digester_(seed), nodes_(pages_), seats_(nodes_), pinned_blocks_(pin_pages_) {}

    const Digester& digester() const { return digester_; }

    u64 add_holder(const std::string& model);
    void remove_holder(u64 holder);
    void clear(u64 holder);
    void declare_groups(u64 holder, const std::vector<Group>& groups);
    void set_reannounces(u64 holder, bool reannounces);
    // Apply one slice; returns false for the last one.
    bool step(Ingest& ingest);
    Report ingest(u64 holder, const u8* payload, std::size_t size, double now_s = 0);
    std::vector<Match> match(const Tokens& prompt, const Scope& scope) const;
    u64 pin(u64 holder, const Tokens& prompt, const Scope& scope);
    // Return the keys of the prefixes that end at multiples of `chunk`, without the whole prompt.
    std::vector<u64> chunk_keys(const Tokens& prompt, const Scope& scope, u64 chunk) const;
    void unpin(u64 pin);
    // Return the blocks of a prompt after `start` that were lost lately, in blocks of `step` tokens; nothing where the loss
    // of the first of them is not stored.
    std::optional<RemovedPrefix> find_removed(const Tokens& prompt, const Scope& scope, u64 start, u64 step) const;
    Stats stats() const;

    // Call visit(const Holder&) under the reader's lock.
    template <class Visit>
    void with_holder(u64 holder, Visit visit) const {
        const std::shared_lock lock(mutex_);
        visit(*get(holder));
    }
    Dump begin_dump(u64 holder) const;
    // Return the parts of the next slice. Throws UnknownHolder where the holder was removed or has changed.
    std::vector<DumpPart> step(Dump& dump) const;
    // Add a part of a dump to a holder.
    Report load(u64 holder, const DumpPart& part);

private:
    struct Pin {
        Holder* holder;
        Seat seat;  // seat of the holder when the prompt was pinned
        u32 pin_length;
        std::vector<u64> boundaries;
        std::optional<u64> checkpoint;
    };

    Holder* get(u64 holder) const;
    Query make_query(const Tokens& prompt, const Scope& scope) const;
    void remove_pin(const Pin& pin);
    void reclassify(const Holder* holder);
    // Move the pins of a holder to its new seat, after it forgot its blocks.
    void move_pins(const Holder& holder);

    mutable std::shared_mutex mutex_;
    // Held by writers of holders_, names and pages_, and taken before mutex_. It is also held while a payload is read into
    // batch_, which needs no exclusive lock of mutex_.
    std::mutex ingest_mutex_;
    Batch batch_;

    const Digester digester_;
    Pages pages_, pin_pages_;  // declared before everything that is allocated in them
    Nodes nodes_;
    Seats seats_;
    RemovedBlocks removed_blocks_;
    PinnedBlocks pinned_blocks_;
    std::map<std::string, std::unique_ptr<ModelHolders>, std::less<>> models_;
    std::unordered_map<u64, std::unique_ptr<Holder>> holders_;
    std::unordered_map<u64, Pin> pins_;
    u64 next_holder_ = 0, next_pin_ = 0;
};

}  // namespace blockcast
