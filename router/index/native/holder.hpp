// Blocks of one holder, by the events of its stream. `Holder` owns names, groups and parked runs and applies events to
// them. It knows no prompts and no other holders. A **name** is the hash by which the engine refers to a block, in 64 bits.
//
// Invariants: a name is known while at least one (group, tier) has a copy of it. A run of blocks is parked while neither its
// parent nor its own first name is known, for at most kParkedBatchesMax batches; parked runs have at most kParkedBlocksMax
// blocks and kParkedBytesMax bytes, and the oldest is dropped first.
// tests/contracts/reference/holder.py is the same in Python, and tests compare the two.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "events.hpp"
#include "nodes.hpp"
#include "table.hpp"

namespace blockcast {

constexpr u64 kSilentAfterStores = 8;
constexpr std::size_t kParkedBlocksMax = 8192, kParkedBytesMax = std::size_t{64} << 20;
constexpr u64 kParkedBatchesMax = 10000;
constexpr std::size_t kHolderNamesMax = std::size_t{1} << 24;  // further names of a holder are refused
constexpr std::size_t kLengthsMax = 32;                        // different block lengths of a holder
constexpr std::size_t kGroupsMax = (kSlotMax + 1) / kTiers;

enum class Role : u8 { Full, Window, Chunk, State, Ignored };

struct Group {
    std::optional<std::int64_t> key;
    std::optional<std::string> kind;
    std::optional<u64> block_size, window;
    bool declared = false, announced = false, sparse = false;
    std::vector<std::pair<u32, u64>> lengths;  // (block length, number of names), ascending by length

    Role role() const { return role_; }
    bool is_full_attention() const { return is_full_attention_; }
    void describe(const Group& other);  // take over what the other one says of kind, block size and window
    void reclassify();  // call it after every change of kind or window
    void count(u32 length, int by);  // change the number of names with a block length
    u64 names() const;
    u64 tokens() const;  // total length of the blocks

private:
    Role role_ = Role::Full;
    bool is_full_attention_ = true;
};

// Prefix that a known name stands for: its key, and its end in tokens.
struct NamePosition {
    u64 key = 0;
    u64 end = 0;
};

// A name in one slot, with its node and the number of copies there. A name in several slots has several entries.
struct NameEntry {
    u64 name;
    u32 node;
    u32 meta;  // slot << 23 | copies
};

struct NameTraits {
    static u32 hash_of(u64 name) { return static_cast<u32>(keyed(name) >> 32); }
    static u32 hash(const NameEntry& entry) { return hash_of(entry.name); }
};

using Names = SegmentedTable<NameEntry, NameTraits>;

// Blocks that wait for their parent or for the first of their names.
struct ParkedRun {
    u32 slot = 0;
    std::vector<u64> names;
    std::vector<bool> waits;
    std::size_t waiting = 0;  // number of true values in `waits`
    u32 length = 0;
    u64 awaits = 0;
    bool is_run = false;  // whether the blocks follow each other; otherwise it is a single sparse name
    std::vector<u32> tokens;
    // Only the blocks are read, as a parked run does not begin a prompt: the texts are views of a payload that is gone.
    std::vector<ExtraKey> extras;
    u64 batch = 0;
};

class Parking {
public:
    std::size_t blocks() const { return blocks_; }
    std::size_t bytes() const { return bytes_; }
    void clear();
    void park(ParkedRun run);
    // Take out the oldest run that waits for a name.
    std::optional<ParkedRun> release(u64 name);
    bool cancel(u32 slot, u64 name);
    // Drop all runs of a tier.
    void clear_tier(u32 tier);
    // Drop the oldest run if it has waited too long; returns its blocks.
    std::size_t expire_one(u64 batch);
    // Drop the oldest run if there are too many blocks; returns its blocks.
    std::size_t evict_one();
    bool empty() const { return runs_.empty(); }

private:
    ParkedRun take(std::map<u64, ParkedRun>::iterator at);
    static std::size_t bytes_of(const ParkedRun& run);

    std::map<u64, ParkedRun> runs_;                          // by serial number, the oldest first
    std::set<std::pair<u64, u64>> awaited_;                  // (awaited name, serial number)
    std::set<std::tuple<u32, u64, u64, std::size_t>> names_;  // (slot, parked name, serial number, index in the run)
    std::size_t blocks_ = 0, bytes_ = 0;
    u64 serial_ = 0;
};

struct Report {
    u64 stored = 0, removed = 0, cleared = 0, parked = 0, unknown_removals = 0, unknown_copies = 0, unknown_events = 0;
    u64 refused = 0;    // blocks beyond a bound
    u64 malformed_events = 0;
    std::vector<std::string> malformed;  // messages for the first malformed events
};

// Data that the holders of one model share.
struct Model {
    std::string name;
    u64 start = 0;  // digest of (name, salt, lora) after the name, the first of the three texts
};

// Names of a cleared holder, which are removed from the nodes in small steps.
struct PendingCleanup {
    Names names;
    Seat seat = 0;
};

// A name in a dump: key and end of its prefix, length of its block, and number of copies.
struct DumpRow {
    u64 name, key, end, length, copies;
};

// Names of a holder in one group on one tier, for another index. The index keeps no token ids, so only an index with the same
// seed can use their digests; the fingerprint identifies the seed.
struct DumpPart {
    u64 fingerprint;
    Group group;
    u32 tier;
    std::vector<DumpRow> rows;
};
constexpr std::size_t kDumpedAtOnce = 4096;  // rows

// Exclusive lock of a writer, which is released and taken again after every kBlocksPerLock changed blocks, so that readers
// (requests, on the event loop) never wait longer. Readers may then see part of a batch. Other writers of names wait for
// the whole batch (Index::ingest_mutex_).
constexpr std::size_t kBlocksPerLock = 4096;  // a millisecond or two

// Most blocks that this thread has changed without releasing the lock; for tests.
inline thread_local std::size_t most_blocks_locked = 0;

class LockSlice {
public:
    explicit LockSlice(std::shared_mutex& mutex) : lock_(mutex) {}

    void count_changes(std::size_t blocks) {
        changed_blocks_ += blocks;
        most_blocks_locked = std::max(most_blocks_locked, changed_blocks_);
        if (changed_blocks_ >= kBlocksPerLock) run_unlocked([] {});
    }

    template <class Work>
    void run_unlocked(Work work) {
        lock_.unlock();
        work();
        lock_.lock();
        changed_blocks_ = 0;
    }

private:
    std::unique_lock<std::shared_mutex> lock_;
    std::size_t changed_blocks_ = 0;
};

class Holder;
constexpr std::size_t kForgottenAtOnce = 1024;  // names

// Bit numbers (seats) of holders in the nodes. A holder that forgets many names takes a new seat at once. Bits of the old
// seat are ignored and cleared in small steps, so that forgetting a million blocks causes no pause. Each stored name clears
// two old ones, so that old seats cannot fill the index.
class Seats {
public:
    explicit Seats(Nodes& nodes) : nodes_(nodes) {}

    Seat take();
    void queue_cleanup(PendingCleanup cleanup);
    // Do one small step of cleanup; returns false where nothing is left.
    bool clean_up_segment();
    bool drain_some(PendingCleanup& cleanup);
    // Clean up about `names` names; the rest of a step is left to the next call.
    void clean_up(std::size_t names) {
        names_due_ = cleanups_.empty() ? 0 : names_due_ + names;
        for (; names_due_ >= kNamesPerSegment; names_due_ -= kNamesPerSegment) clean_up_segment();
    }
    std::size_t count() const { return count_; }
    std::size_t bytes() const;

private:
    Nodes& nodes_;
    static constexpr std::size_t kNamesPerSegment = 450;  // average number of names in a segment
    std::size_t names_due_ = 0;
    Seat count_ = 0;
    std::vector<Seat> free_;
    std::vector<PendingCleanup> cleanups_;
};

struct KeyedHash {
    std::size_t operator()(u64 name) const { return keyed(name) >> 32; }
};

class Holder {
public:
    Holder(u64 id, Model* model, const Digester& digester, Pages& pages, Nodes& nodes, Seats& seats,
           RemovedBlocks& removed_blocks)
        : id(id), model(model), seat(seats.take()), digester_(digester), pages_(pages),
          nodes_(nodes), seats_(seats), removed_blocks_(removed_blocks), names_(pages) {}

    const u64 id;
    Model* const model;
    Seat seat;
    bool reannounces = false;
    std::vector<Group> groups;  // by ordinal; slot = ordinal * kTiers + tier

    // Apply a slice of a payload. `first`: it is the payload's first slice.
    void apply(const Batch& batch, bool first, LockSlice& lock, Report& report);
    // Add the names of a dump.
    void load(const DumpPart& part, LockSlice& lock, Report& report);
    void declare(const std::vector<Group>& declared);
    // Forget all blocks, and groups that were learned from events.
    void clear();
    // Leave the index; the holder must not be used afterwards.
    void detach();

    bool silent(const Group& group) const {
        return group.declared && !group.announced && full_stores_ >= kSilentAfterStores;
    }
    bool demands(const Group& group) const {
        return (group.declared || group.announced) && group.role() != Role::Ignored && !silent(group) &&
               (group.key || !grouped());  // blocks without a group do not count once events name groups
    }
    // Block length at whose multiples a prompt in flight will be resumable.
    u32 pin_length() const;

    u64 entries() const { return names_.size(); }
    std::size_t bytes() const { return names_.bytes() + parking_.bytes() + sizeof *this; }
    std::size_t parked() const { return parking_.blocks(); }

    // Number that changes with the holder's names.
    u64 changes() const { return changes_; }
    // Call visit(name, node id, slot, copies) for one part of the table; returns false for the last part.
    template <class Visit>
    bool each_name(std::size_t part, Visit visit) const {
        return names_.each_of(part, [&](const NameEntry& entry) {
            visit(entry.name, entry.node, slot_of(entry.meta), entry.meta & kCopies);
        });
    }

private:
    friend class Seats;
    static constexpr u32 kCopies = (1u << 23) - 1;
    static u32 slot_of(u32 meta) { return meta >> 23; }

    // Each block touches two random places in memory, its name's entry and its node, which are prefetched kAhead blocks
    // before.
    static constexpr std::size_t kAhead = 32;
    static constexpr std::size_t kBlocksPerCount = 1024;       // blocks; more are resolved outside the lock
    static constexpr std::size_t kHashedAtOnce = 1 << 16;  // tokens; more are hashed outside the lock

    // Account for changed blocks: clean up old seats, and release the lock if it is time.
    void count_changed_blocks(std::size_t blocks) {
        seats_.clean_up(2 * blocks);
        lock_->count_changes(blocks);
    }

    void drop_blocks();
    void clear_tier(u32 tier, Report& report);
    void apply_events(const Batch& batch, std::size_t begin, std::size_t end, Report& report);
    void resolve_positions(const Batch& batch, std::size_t begin, std::size_t end);
    bool resolve_run(const Batch& batch, std::size_t run);
    void keep_positions(const Batch& batch, const Stored& event);
    std::optional<NamePosition> position_of(u64 name) const;
    // Return the position after `count` more tokens.
    NamePosition advance(const NamePosition& from, const u32* tokens, std::size_t count) const {
        return {digester_.extend(from.key, tokens, count), from.end + count};
    }
    std::optional<NamePosition> start_position(const Batch& batch, const Stored& event) const;
    u32 block_length(const Stored& event, u32 slot) const;
    u64 start_digest(const Text& salt, const Text& lora) const;
    u32 update_group(const Stored& event);
    void store(const Batch& batch, std::size_t run, Report& report);
    void store_copies(const Batch& batch, const Stored& event, Report& report);
    u64 length_of_copy(u64 name, u32 ordinal, u32 event_length) const;
    bool grouped() const;
    std::vector<u32> candidate_groups() const;
    std::optional<u32> find_group(const std::vector<u32>& candidates, const u64* names, std::size_t count) const;
    void store_unresolved(const Batch& batch, const Stored& event, u32 ordinal, u32 slot, Report& report);
    void resolve_last_block(const Batch& batch, const Stored& event, u64 name);
    void wake(const u64* names, std::size_t count, Report& report);
    void park(ParkedRun run);
    std::vector<u64> attach(const ParkedRun& run);

    NameEntry* find(u64 name) const {
        return names_.find(NameTraits::hash_of(name), [&](const NameEntry& entry) { return entry.name == name; });
    }
    NameEntry* find(u64 name, u32 slot) const {
        return names_.find(NameTraits::hash_of(name), [&](const NameEntry& entry) {
            return entry.name == name && slot_of(entry.meta) == slot;
        });
    }
    // Return the entry of a name on the fastest tier of a group; null where the group does not hold it.
    NameEntry* find_fastest(u64 name, u32 ordinal) const {
        for (u32 tier = 0; tier < kTiers; ++tier) {
            if (NameEntry* entry = find(name, ordinal * kTiers + tier)) return entry;
        }
        return nullptr;
    }
    void add(u64 name, const NamePosition& position, u32 slot, u32 length, u32 copies = 1);
    void add_copies(u32& node, u32& meta, const NamePosition& position, u32 slot, u32 length, u32 copies);
    bool remove(u64 name, u32 slot, std::optional<u32> left = std::nullopt);
    bool set_copies_left(u32& meta, std::optional<u32> left) const;
    void forget_name(u64 name);
    void erase(NameEntry* entry);
    bool has_room(u32 ordinal, u32 length, std::size_t count) const;
    u32 ordinal(const std::optional<std::int64_t>& key);
    std::optional<u32> find_ordinal(const std::optional<std::int64_t>& key) const;

    const Digester& digester_;
    Pages& pages_;
    Nodes& nodes_;
    Seats& seats_;
    RemovedBlocks& removed_blocks_;
    Names names_;
    Parking parking_;
    std::unordered_map<u64, NamePosition, KeyedHash> batch_positions_;  // positions of names with tokens in this batch
    std::vector<NamePosition> positions_;    // position of each name of the batch, in runs that are resolved
    std::vector<bool> resolved_;   // whether each stored event of the batch is resolved
    u64 full_stores_ = 0, batch_ = 0, changes_ = 0;
    bool keeps_positions_ = true;
    LockSlice* lock_ = nullptr;  // set while a batch is applied
};

}  // namespace blockcast
