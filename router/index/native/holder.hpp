// What one publisher stream says it holds. Owns names, groups and parked runs of one holder, and with them the meaning of
// events. Refuses to know prompts and other holders.
//
// Invariants: a name is known while at least one (group, tier) holds a copy of it; a run is parked while neither its parent
// nor its own first name is known, at most kParkedBlocksMax blocks and kParkedBytesMax bytes (the oldest run goes), for kParkedBatchesMax batches.
// tests/contracts/reference/holder.py says the same in Python; the tests compare the two.
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
constexpr std::size_t kHolderNamesMax = std::size_t{1} << 24;  // of one holder; more are not taken
constexpr std::size_t kLengthsMax = 32;                        // block lengths of all its groups
constexpr std::size_t kGroupsMax = (kSlotMax + 1) / kTiers;

enum class Role : u8 { Full, Window, Chunk, State, Ignored };

struct Group {
    std::optional<std::int64_t> key;
    std::optional<std::string> kind;
    std::optional<u64> block_size, window;
    bool declared = false, heard = false, sparse = false;
    std::vector<std::pair<u32, u64>> lengths;  // (block length, names held), ascending, no zero

    Role role() const { return role_; }
    bool teaches() const { return teaches_; }
    void reclassify();  // after every change of kind or window
    // More or fewer names of a length. True where the length appeared or vanished.
    bool count(u32 length, int by);
    u64 names() const;
    u64 tokens() const;  // of the blocks they name

private:
    Role role_ = Role::Full;
    bool teaches_ = true;
};

// Where a known name stands.
struct NamePosition {
    u64 key = 0;
    u64 end = 0;
};

// A name in one slot, inline; or, for a name in several slots, the head of a list.
struct NameEntry {
    u64 name;
    u32 node;  // 0 = empty entry
    u32 meta;  // slot << 24 | copies, or kMany | id of the first Link
};

struct Link {
    u32 node, meta, next;
};

struct NameTraits {
    static u32 hash_of(u64 name) { return static_cast<u32>(keyed(name) >> 32); }
    static u32 hash(const NameEntry& entry) { return hash_of(entry.name); }
};

using Links = Pool<Link>;
using Names = SegmentedTable<NameEntry, NameTraits>;

struct ParkedRun {
    u32 slot = 0;
    std::vector<u64> names;
    std::vector<bool> waits;
    std::size_t waiting = 0;  // of them
    u32 length = 0;
    u64 awaits = 0;
    bool is_run = false;  // else a single sparse name
    std::vector<u32> tokens;
    std::vector<ExtraKey> extras;  // their texts are not kept: a parked run does not start a prompt
    u64 batch = 0;
};

class Parking {
public:
    std::size_t blocks() const { return blocks_; }
    std::size_t bytes() const { return bytes_; }
    void clear();
    void park(ParkedRun run);
    // One run that waits for the name, the oldest first.
    std::optional<ParkedRun> release(u64 name);
    bool cancel(u32 slot, u64 name);
    // All that waits to stand on a tier.
    void clear_tier(u32 tier);
    // Drops the oldest run if it has waited for too long; how many blocks that were.
    std::size_t expire_one(u64 batch);
    // Drops the oldest run if there are too many; how many blocks that were.
    std::size_t evict_one();
    bool empty() const { return runs_.empty(); }

private:
    ParkedRun take(std::map<u64, ParkedRun>::iterator at);
    static std::size_t bytes_of(const ParkedRun& run);

    std::map<u64, ParkedRun> runs_;                          // by serial: oldest first
    std::set<std::pair<u64, u64>> awaited_;                  // (name, serial)
    std::set<std::tuple<u32, u64, u64, std::size_t>> names_;  // (slot, name, serial, index in the run): what waits
    std::size_t blocks_ = 0, bytes_ = 0;
    u64 serial_ = 0;
};

struct Report {
    u64 stored = 0, removed = 0, cleared = 0, parked = 0, unknown_removals = 0, unknown_copies = 0, unknown_events = 0;
    u64 refused = 0;    // blocks beyond a bound
    u64 malformed_events = 0;
    std::vector<std::string> malformed;  // the first ones
};

// What the holders of one model share.
struct Model {
    std::string name;
    u64 start = 0;               // digest of a list of three texts after the first, its name
    std::map<u32, u64> lengths;  // block lengths in use: how many (holder, group) use each
};

// Names and links of a holder's past life, waiting to be taken out of the nodes bit by bit.
struct PendingCleanup {
    Names names;
    Links links;
    Seat seat = 0;
};

// A batch of one BlockDigests (event_digests.cpp).
std::string write_digests(u64 fingerprint, const Group& group, u32 tier, const std::vector<DigestRow>& rows);
constexpr std::size_t kDumpedAtOnce = 4096;  // rows

// The writer's hold on the index through much work. Readers (requests, on the event loop) wait for nobody longer than
// kTurnBlocks blocks take: a writer that has changed so many gives the lock up once and takes it again. What it holds then
// is a beginning of its batch; other writers of names wait all the same (Index::ingest_mutex_).
constexpr std::size_t kTurnBlocks = 4096;  // a millisecond or two

// The most blocks that a thread changed under one hold; for tests.
inline thread_local std::size_t longest_turn = 0;

class LockSlice {
public:
    explicit LockSlice(std::shared_mutex& mutex) : lock_(mutex) {}

    void pay(std::size_t blocks) {
        paid_ += blocks;
        longest_turn = std::max(longest_turn, paid_);
        if (paid_ >= kTurnBlocks) without([] {});
    }

    template <class Work>
    void without(Work work) {
        lock_.unlock();
        work();
        lock_.lock();
        paid_ = 0;
    }

private:
    std::unique_lock<std::shared_mutex> lock_;
    std::size_t paid_ = 0;
};

class Holder;
constexpr std::size_t kForgottenAtOnce = 1024;  // names

// Who sits on which seat. A holder that forgets many names takes a fresh seat at once; what stands under the old one
// means nothing any more and is cleared away in small steps, so that forgetting a million blocks is no pause. Every name
// stored pays for two old ones: whoever stores and forgets in turn does not fill the index with old seats.
class Seats {
public:
    explicit Seats(Nodes& nodes) : nodes_(nodes) {}

    Seat take(Holder* owner);
    void retire(PendingCleanup estate);
    // One small step of clearing away; false where nothing is left to do.
    bool settle_some();
    bool drain_some(PendingCleanup& estate);
    // As many steps as clear about `names` away; a part of a step is kept for the next call.
    void settle(std::size_t names) {
        for (owed_ = estates_.empty() ? 0 : owed_ + names; owed_ >= kNamesAStep; owed_ -= kNamesAStep) settle_some();
    }
    Holder* owner(Seat seat) const { return seat < owners_.size() ? owners_[seat] : nullptr; }
    std::size_t count() const { return owners_.size(); }
    std::size_t bytes() const;

private:
    Nodes& nodes_;
    static constexpr std::size_t kNamesAStep = 450;  // in a segment, on average
    std::size_t owed_ = 0;
    std::vector<Holder*> owners_;
    std::vector<Seat> free_;
    std::vector<PendingCleanup> estates_;
};

// Places of the names that a batch spells out, by name. A flat table that is reused: an entry counts in its epoch only.
class BatchNames {
public:
    void clear(std::size_t names);
    void put(u64 name, const NamePosition& place);
    const NamePosition* get(u64 name) const;
    void end() { names_ = 0; }

private:
    struct Entry {
        u64 name;
        NamePosition place;
        u64 epoch;
    };
    std::size_t home(u64 name) const { return keyed(name) >> shift_; }
    void grow();

    std::vector<Entry> entries_;
    u64 epoch_ = 0;
    u32 shift_ = 64;
    std::size_t names_ = 0;
};

class Holder {
public:
    Holder(u64 id, std::string name, Model* model, const Digester& digester, Pages& pages, Nodes& nodes, Seats& seats,
           RemovedBlocks& departed)
        : id(id), name(std::move(name)), model(model), seat(seats.take(this)), digester_(digester), pages_(pages),
          nodes_(nodes), seats_(seats), departed_(departed), names_(pages) {}

    const u64 id;
    const std::string name;
    Model* const model;
    Seat seat;
    bool reannounces = false;
    mutable u64 placed = ~u64{0};  // its shape when its model last looked where it stands
    std::vector<Group> groups;  // by ordinal; slot = ordinal * kTiers + tier

    // `first`: of the slices of its payload.
    void apply(const Batch& batch, bool first, LockSlice& turn, Report& report);
    // These names are coming: asks for the first of them.
    void expect(const u64* names, std::size_t count) const {
        for (std::size_t i = 0; i < std::min(count, kAhead); ++i) names_.prefetch(NameTraits::hash_of(names[i]));
    }
    void declare(const std::vector<Group>& declared);
    // A new life of the stream: also what the events taught about groups is forgotten.
    void clear();
    // Leaves the index; the holder is not used afterwards.
    void leave();

    bool silent(const Group& group) const {
        return group.declared && !group.heard && full_stores_ >= kSilentAfterStores;
    }
    bool demands(const Group& group) const {
        return (group.declared || group.heard) && group.role() != Role::Ignored && !silent(group) &&
               (group.key || !grouped());  // what came without a group before the others said theirs
    }
    // The block length at which a prompt in flight will be resumable.
    u32 cut() const;

    u64 entries() const { return entries_; }
    std::size_t bytes() const { return names_.bytes() + links_.bytes() + parking_.bytes() + sizeof *this; }
    std::size_t parked() const { return parking_.blocks(); }

    // While this is the same, it holds the same names.
    u64 changes() const { return changes_; }
    // While this is the same, it is matched the same way (Standing).
    u64 shape() const { return shape_; }
    // The names of one part of the table, visit(name, node id, slot, copies); false where that was the last part.
    template <class Visit>
    bool each_name(std::size_t part, Visit visit) const {
        return names_.each_of(part, [&](const NameEntry& entry) { each_slot(entry, links_, [&](u32 node, u32 meta) {
            visit(entry.name, node, slot_of(meta), meta & kCopies);
        }); });
    }

private:
    friend class Seats;
    static constexpr u32 kMany = 1u << 31, kCopies = (1u << 23) - 1;
    static u32 slot_of(u32 meta) { return meta >> 23 & kSlotMax; }

    template <class Visit>  // visit(node id, meta)
    static void each_slot(const NameEntry& entry, const Links& links, Visit visit) {
        if ((entry.meta & kMany) == 0) return visit(entry.node, entry.meta);
        for (u32 at = entry.meta & ~kMany; at != 0; at = links[at].next) visit(links[at].node, links[at].meta);
    }

    // Each block touches two random places in memory: its name's, asked for while the payload is read (`expect`), and its
    // node's, asked for while the tokens are hashed; beyond the first kAhead, that many blocks before they are needed.
    static constexpr std::size_t kAhead = 32;
    static constexpr std::size_t kPaidAtOnce = 1024;       // blocks
    static constexpr std::size_t kHashedAtOnce = 1 << 16;  // tokens; more are hashed outside the lock

    // So many blocks were changed.
    void worked(std::size_t blocks) {
        settle();
        seats_.settle(2 * blocks);
        turn_->pay(blocks);
    }

    void forget_blocks();
    void clear_tier(u32 tier, Report& report);
    void apply_stretch(const Batch& batch, std::size_t begin, std::size_t end, Report& report);
    void teach(const Batch& batch, std::size_t begin, std::size_t end);
    void teach_open(const Batch& batch, const std::vector<std::size_t>& open);
    bool teach_run(const Batch& batch, std::size_t run);
    void remember(const Batch& batch, const Stored& event);
    std::optional<NamePosition> place_of(u64 name) const;
    std::optional<NamePosition> start_of(const Batch& batch, const Stored& event) const;
    u32 length_of_partial(const Stored& event, u32 slot) const;
    u64 start_digest(const Text& salt, const Text& lora) const;
    u32 hear(const Stored& event);
    void store(const Batch& batch, std::size_t run, Report& report);
    void store_copies(const Batch& batch, const Stored& event, Report& report);
    u64 length_of_copy(u64 name, u32 ordinal, u32 told) const;
    bool grouped() const;
    std::vector<u32> homes() const;
    std::optional<u32> home(const std::vector<u32>& homes, const u64* names, std::size_t count) const;
    void store_unresolved(const Batch& batch, const Stored& event, u32 ordinal, u32 slot, Report& report);
    void place_last(const Batch& batch, const Stored& event, u64 name);
    void load(const Digests& digests, Report& report);
    void wake(const u64* names, std::size_t count);
    void park(ParkedRun run);
    std::vector<u64> attach(const ParkedRun& run);

    NameEntry* find(u64 name) const { return find(names_.spot(NameTraits::hash_of(name)), name); }
    NameEntry* find(const Names::HashSlot& spot, u64 name) const {
        return names_.find(spot, [&](const NameEntry& entry) { return entry.name == name; });
    }
    void add(u64 name, const NamePosition& place, u32 slot, u32 length, u32 copies = 1);
    void again(u32& node, u32& meta, const NamePosition& place, u32 slot, u32 length, u32 copies);
    bool remove(u64 name, u32 slot, std::optional<u32> left = std::nullopt);
    bool keeps(u32& meta, std::optional<u32> left) const;
    void forget_name(NameEntry* entry);
    void count_length(u32 slot, u32 length, int by);
    void count_fresh(u32 slot, u32 length);
    void adjust_length(u32 slot, u32 length, int by);
    void settle();
    bool has_room(u32 ordinal, u32 length, std::size_t count) const;
    u32 ordinal(const std::optional<std::int64_t>& key);
    std::optional<u32> find_ordinal(const std::optional<std::int64_t>& key) const;

    const Digester& digester_;
    Pages& pages_;
    Nodes& nodes_;
    Seats& seats_;
    RemovedBlocks& departed_;
    Names names_;
    Links links_;
    Parking parking_;
    BatchNames taught_;
    std::vector<NamePosition> places_;    // per name of the batch, where its run has been resolved
    std::vector<bool> resolved_;   // per stored event of the batch
    u64 full_stores_ = 0, batch_ = 0, entries_ = 0, changes_ = 0, shape_ = 0;
    // Names that `add` has put into a slot anew and that `groups` and `entries_` do not count yet; 0 between events.
    u64 fresh_ = 0;
    u32 fresh_slot_ = 0, fresh_length_ = 0;
    bool teaching_ = true;
    LockSlice* turn_ = nullptr;  // while a batch is applied
};

}  // namespace blockcast
