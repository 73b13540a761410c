// What events do to a holder: names are resolved over a whole batch, then presences change in order.
#include <algorithm>
#include <map>

#include "holder.hpp"

namespace blockcast {

namespace {

// vLLM puts the salt behind the media keys of a prompt's first block: the last plain text.
const ExtraKey* salt_of_first(const ExtraKey* extras, std::size_t count) {
    const ExtraKey* salt = nullptr;
    for (std::size_t i = 0; i < count && extras[i].block == 0; ++i) {
        if (extras[i].text) salt = &extras[i];
    }
    return salt;
}

// The blocks of a run that have a key besides the salt: they match no prompt, which costs a miss and never a false hit.
class OpaqueBlocks {
public:
    // `is_prompt_start`: the run begins a prompt, and its salt may stand among the keys.
    OpaqueBlocks(const ExtraKey* extras, std::size_t count, bool is_prompt_start)
        : next_(extras), end_(extras + count), salt_(is_prompt_start ? salt_of_first(extras, count) : nullptr) {
        if (count != 0) count_extra(count);
    }

    // Return whether a block has such a key. Blocks are asked for in order.
    bool contain(std::size_t block) {
        bool found = false;
        for (; next_ != end_ && next_->block <= block; ++next_) found = found || (next_->block == block && next_ != salt_);
        return found;
    }

private:
    const ExtraKey *next_, *end_, *const salt_;
};

}  // namespace

void Holder::apply(const Batch& batch, bool first, LockSlice& turn, Report& report) {
    turn_ = &turn;
    ++changes_;
    batch_ += first;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < batch.events.size(); ++i) {
        const Event& event = batch.events[i];
        if (event.kind != Event::Kind::Cleared && event.kind != Event::Kind::Digests) continue;
        apply_stretch(batch, begin, i, report);
        begin = i + 1;
        if (event.kind == Event::Kind::Cleared && event.index != 0) {
            clear_tier(static_cast<u32>(event.index - 1), report);
        } else if (event.kind == Event::Kind::Cleared) {
            forget_blocks();
            ++report.cleared;
        } else {
            load(batch.digests[event.index], report);
        }
    }
    apply_stretch(batch, begin, batch.events.size(), report);
    while (const std::size_t blocks = parking_.expire_one(batch_)) turn_->pay(blocks);
    turn_ = nullptr;
}

void Holder::apply_stretch(const Batch& batch, std::size_t begin, std::size_t end, Report& report) {
    if (begin == end) return;
    if (batch.tokens.size() > kHashedAtOnce || batch.names.size() > kPaidAtOnce) {
        turn_->without([&] { teach(batch, begin, end); });  // no reader looks at what it writes
    } else {
        teach(batch, begin, end);
    }
    for (std::size_t i = begin; i < end; ++i) {
        const Event& event = batch.events[i];
        if (event.kind == Event::Kind::Stored) {
            store(batch, event.index, report);
            continue;
        }
        const Removed& removed = batch.removed[event.index];
        const std::optional<u32> ordinal = find_ordinal(removed.group);
        const std::vector<u32> others = removed.group ? std::vector<u32>() : homes();
        for (std::size_t n = 0; n < removed.names.count; ++n) {
            const u64 name = batch.names[removed.names.begin + n];
            std::optional<u32> copies;
            if (removed.copies.count != 0) copies = batch.copies[removed.copies.begin + n];
            const auto left = [&](u32 at) {
                const u32 slot = at * kTiers + removed.tier;
                return remove(name, slot, copies) || parking_.cancel(slot, name);
            };
            const bool known = (ordinal && left(*ordinal)) || std::any_of(others.begin(), others.end(), left);
            ++(known ? report.removed : report.unknown_removals);
            turn_->pay(1);
        }
    }
    const auto forget = [&] { taught_ = {}; };
    taught_.size() > kPaidAtOnce ? turn_->without(forget) : forget();  // many take milliseconds
}

void Holder::teach(const Batch& batch, std::size_t begin, std::size_t end) {
    std::size_t runs = 0;
    bool bare = false;
    std::vector<std::size_t> open;
    for (std::size_t i = begin; i < end; ++i) {
        if (batch.events[i].kind != Event::Kind::Stored) continue;
        const Stored& event = batch.stored[batch.events[i].index];
        bare = bare || event.bare();
        ++runs;
    }
    // What a lone run spells out is used by nobody else in the batch, except by what it may set free.
    teaching_ = runs > 1 || !parking_.empty();
    if (places_.size() < batch.names.size()) places_.resize(batch.names.size());
    resolved_.assign(batch.stored.size(), false);
    for (std::size_t i = begin; bare && i < end; ++i) {
        if (batch.events[i].kind == Event::Kind::Stored) remember(batch, batch.stored[batch.events[i].index]);
    }
    for (std::size_t i = begin; i < end; ++i) {
        const std::size_t run = batch.events[i].index;
        if (batch.events[i].kind != Event::Kind::Stored || !batch.stored[run].dense()) continue;
        if (!teach_run(batch, run)) open.push_back(run);
    }
    if (!open.empty()) teach_open(batch, open);
}

// The runs whose start is spelt out by a later one. Each is tried when a name that it waits for has become known, and then
// only: a chain told backwards costs no more than one told forwards.
void Holder::teach_open(const Batch& batch, const std::vector<std::size_t>& open) {
    std::multimap<u64, std::size_t> waiting;  // name (its parent's, or its own first) -> run
    for (std::size_t run : open) {
        const Stored& event = batch.stored[run];
        waiting.emplace(event.parent, run);
        waiting.emplace(batch.names[event.names.begin], run);
    }
    std::vector<std::size_t> ready = open;
    for (std::size_t next = 0; next < ready.size(); ++next) {
        const std::size_t run = ready[next];
        count_extra(1);
        if (resolved_[run] || !teach_run(batch, run)) continue;
        const Slice names = batch.stored[run].names;
        for (std::size_t i = 0; i < names.count; ++i) {
            const auto [from, to] = waiting.equal_range(batch.names[names.begin + i]);
            for (auto at = from; at != to; ++at) ready.push_back(at->second);
            waiting.erase(from, to);
        }
    }
}

bool Holder::teach_run(const Batch& batch, std::size_t run) {
    const Stored& event = batch.stored[run];
    const u64* names = batch.names.data() + event.names.begin;
    const ExtraKey* extras = batch.extras.data() + event.extras.begin;
    NamePosition* places = places_.data() + event.names.begin;
    std::size_t first = 0;
    NamePosition place;
    if (const std::optional<NamePosition> start = start_of(batch, event)) {
        place = *start;
    } else if (const std::optional<NamePosition> own = place_of(names[0])) {
        place = places[0] = *own;
        first = 1;
    } else {
        return false;
    }
    const u32* tokens = batch.tokens.data() + event.tokens.begin;
    OpaqueBlocks opaque(extras, event.extras.count, !event.salt && place.end == 0);
    for (std::size_t i = first; i < event.names.count; ++i) {
        if (opaque.contain(i)) place.key = digester_.make_opaque(place.key);
        place.key = digester_.extend(place.key, tokens + i * event.block_size, event.block_size);
        place.end += event.block_size;
        places[i] = place;
        if (i < kAhead) nodes_.prefetch(Nodes::hash(place.key, event.block_size));
        if (teaching_) taught_.insert_or_assign(names[i], place);
    }
    resolved_[run] = true;
    return true;
}

// Where the run begins: behind its parent; behind the tokens that the event says were skipped after an ancestor; or at the
// start of a prompt, also where a publisher calls that the parent 0.
std::optional<NamePosition> Holder::start_of(const Batch& batch, const Stored& event) const {
    const auto root = [&] {
        const ExtraKey* salt = salt_of_first(batch.extras.data() + event.extras.begin, event.extras.count);
        return NamePosition{start_digest(event.salt ? event.salt : salt ? salt->text : Text(), event.lora), 0};
    };
    if (!event.has_parent) return root();
    if (const std::optional<NamePosition> parent = place_of(event.parent)) return parent;
    if (event.skipped.count != 0) {
        const std::optional<NamePosition> from = event.has_ancestor ? place_of(event.ancestor) : NamePosition{start_digest(event.salt, event.lora), 0};
        if (!from) return std::nullopt;
        const u32* tokens = batch.skipped.data() + event.skipped.begin;
        return NamePosition{digester_.extend(from->key, tokens, event.skipped.count), from->end + event.skipped.count};
    }
    if (event.parent == 0) return root();
    return std::nullopt;
}

// The length of a block that is not full yet, named at a finer boundary than the full blocks before it (vLLM's partial
// blocks): it begins where the last full one ends. For any other run, its block size.
u32 Holder::length_of_partial(const Stored& event, u32 slot) const {
    if (event.names.count != 1 || event.skipped.count == 0 || !event.has_ancestor) return event.block_size;
    const NameEntry* entry = find(event.ancestor, slot);
    const u64 full = entry == nullptr ? 0 : nodes_[entry->node].length;
    const u64 whole = event.skipped.count + event.block_size;
    return event.block_size < full && whole <= full ? static_cast<u32>(whole) : event.block_size;
}

u64 Holder::start_digest(const Text& salt, const Text& lora) const { return digester_.text(model->start, {salt, lora}); }

u32 Holder::hear(const Stored& event) {
    const u32 at = ordinal(event.group);
    Group& group = groups[at];
    const bool other_kind = event.kind && !event.kind->empty() && group.kind != event.kind;
    const bool other_window = event.window && group.window != event.window;
    if (!group.heard || other_kind || other_window || group.block_size != event.block_size) {
        group.heard = true;
        if (other_kind) group.kind = std::string(*event.kind);
        if (other_window) group.window = event.window;
        if (other_kind || other_window) group.reclassify();
        group.block_size = event.block_size;
    }
    full_stores_ += group.teaches();
    return at;
}

void Holder::store(const Batch& batch, std::size_t run, Report& report) {
    const Stored& event = batch.stored[run];
    if (event.bare()) return store_copies(batch, event, report);
    std::optional<u32> guest;
    if (!event.group) guest = home(homes(), batch.names.data() + event.names.begin, event.names.count);
    const u32 ordinal = guest ? *guest : hear(event);
    const u32 slot = ordinal * kTiers + event.tier;
    if (!guest && !event.dense()) groups[ordinal].sparse = true;
    const u32 length = length_of_partial(event, slot);
    if (!has_room(ordinal, length, event.names.count)) {
        report.refused += event.names.count;
        return;
    }
    if (!resolved_[run]) return store_unresolved(batch, event, ordinal, slot, report);
    const u64* names = batch.names.data() + event.names.begin;
    const NamePosition* places = places_.data() + event.names.begin;
    const std::size_t count = event.names.count;
    for (std::size_t i = 0; i < count; ++i) {
        if (i + kAhead < count) {
            names_.prefetch(NameTraits::hash_of(names[i + kAhead]));
            nodes_.prefetch(Nodes::hash(places[i + kAhead].key, length));
        }
        add(names[i], places[i], slot, length);
        if ((i + 1) % kPaidAtOnce == 0) worked(kPaidAtOnce);
    }
    worked(count % kPaidAtOnce);
    report.stored += count;
    wake(names, count);
}

// A sparse store, or a dense one that hangs in the air.
void Holder::store_unresolved(const Batch& batch, const Stored& event, u32 ordinal, u32 slot, Report& report) {
    const u64* names = batch.names.data() + event.names.begin;
    const std::size_t count = event.names.count;
    const bool dense = event.dense();
    if (!dense && count == 1 && groups[ordinal].role() == Role::State && !place_of(names[0]) &&
        std::none_of(groups.begin(), groups.end(), [](const Group& group) { return group.teaches(); })) {
        place_last(batch, event, names[0]);
    }
    std::vector<std::optional<NamePosition>> places(count);
    bool all = true;
    for (std::size_t i = 0; i < count; ++i) {
        places[i] = place_of(names[i]);
        all = all && places[i];
    }
    if (dense && !all) {
        ParkedRun parked;
        parked.slot = slot;
        parked.names.assign(names, names + count);
        for (const auto& place : places) parked.waits.push_back(!place);
        for (bool waits : parked.waits) report.parked += waits;
        parked.length = event.block_size;
        parked.awaits = event.has_parent ? event.parent : names[0];
        parked.is_run = true;
        parked.tokens.assign(batch.tokens.begin() + event.tokens.begin,
                             batch.tokens.begin() + event.tokens.begin + event.tokens.count);
        parked.extras.assign(batch.extras.begin() + event.extras.begin,
                             batch.extras.begin() + event.extras.begin + event.extras.count);
        parked.batch = batch_;
        park(std::move(parked));
    }
    std::vector<u64> placed;
    for (std::size_t i = 0; i < count; ++i) {
        if (places[i]) {
            add(names[i], *places[i], slot, event.block_size);
            placed.push_back(names[i]);
            worked(1);
        } else if (!dense) {
            ParkedRun parked;
            parked.slot = slot;
            parked.names = {names[i]};
            parked.waits = {true};
            parked.length = event.block_size;
            parked.awaits = names[i];
            parked.batch = batch_;
            park(std::move(parked));
            ++report.parked;
        }
    }
    report.stored += placed.size();
    wake(placed.data(), placed.size());
}

void Holder::park(ParkedRun run) {
    if (run.names.size() > kParkedBlocksMax) return;
    turn_->pay(run.names.size());
    parking_.park(std::move(run));
    while (const std::size_t blocks = parking_.evict_one()) turn_->pay(blocks);
}

// A state event with one hash names the end of its tokens; for models without full attention to say so.
void Holder::place_last(const Batch& batch, const Stored& event, u64 name) {
    const std::optional<NamePosition> start = start_of(batch, event);
    if (!start) return;
    const u32* tokens = batch.tokens.data() + event.tokens.begin;
    taught_.insert_or_assign(name, NamePosition{digester_.extend(start->key, tokens, event.tokens.count), start->end + event.tokens.count});
}

// The places of `names` are known now: attach what waited for them, and what waited for that.
void Holder::wake(const u64* names, std::size_t count) {
    if (parking_.empty()) return;
    std::vector<u64> stack(names, names + count);
    while (!stack.empty()) {
        const u64 name = stack.back();
        stack.pop_back();
        while (const std::optional<ParkedRun> run = parking_.release(name)) {
            const std::vector<u64> attached = attach(*run);
            stack.insert(stack.end(), attached.begin(), attached.end());
            turn_->pay(run->names.size() - attached.size() + run->tokens.size() / 64);
        }
    }
}

std::vector<u64> Holder::attach(const ParkedRun& run) {
    if (!has_room(run.slot / kTiers, run.length, run.names.size())) return {};
    if (run.is_run) {
        std::size_t first = 0;
        std::optional<NamePosition> place = place_of(run.awaits);
        if (!place) place = place_of(run.names[0]), first = 1;
        OpaqueBlocks opaque(run.extras.data(), run.extras.size(), false);
        for (std::size_t i = first; place && i < run.names.size(); ++i) {
            const u64 key = opaque.contain(i) ? digester_.make_opaque(place->key) : place->key;
            place = NamePosition{digester_.extend(key, run.tokens.data() + i * run.length, run.length), place->end + run.length};
            taught_.insert_or_assign(run.names[i], *place);
        }
    }
    std::vector<u64> attached;
    for (std::size_t i = 0; i < run.names.size(); ++i) {
        const std::optional<NamePosition> place = place_of(run.names[i]);
        if (!run.waits[i] || !place) continue;
        add(run.names[i], *place, run.slot, run.length);
        attached.push_back(run.names[i]);
        if (attached.size() % kPaidAtOnce == 0) worked(kPaidAtOnce);
    }
    worked(attached.size() % kPaidAtOnce);
    return attached;
}

void Holder::load(const Digests& digests, Report& report) {
    if (digests.fingerprint != digester_.fingerprint()) {
        ++report.malformed_events;
        report.malformed.push_back("BlockDigests.fingerprint is of another seed: this index cannot use it");
        return;
    }
    const u32 at = ordinal(digests.group);
    Group& group = groups[at];
    group.heard = group.heard || digests.heard;
    if (digests.kind && !digests.kind->empty()) group.kind = std::string(*digests.kind);
    if (digests.block_size.value_or(0) - 1 < kBlockSizeMax) group.block_size = digests.block_size;
    if (digests.window.value_or(0)) group.window = digests.window;
    group.sparse = group.sparse || digests.sparse;
    group.reclassify();
    std::vector<u64> names;
    for (const DigestRow& row : digests.rows) {
        if (!has_room(at, static_cast<u32>(row.length), 1)) {
            ++report.refused;
            continue;
        }
        add(row.name, NamePosition{row.key, row.end}, at * kTiers + digests.tier, static_cast<u32>(row.length),
            reannounces ? 1 : static_cast<u32>(row.copies));
        worked(1);
        names.push_back(row.name);
    }
    wake(names.data(), names.size());
    report.stored += digests.rows.size();
    taught_ = {};
}

}  // namespace blockcast
