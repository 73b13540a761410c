// Application of events to a holder: the positions of all names of a batch are resolved first, as an event may have names whose
// tokens only a later event has. Then the events take effect in their order. A run whose parent is unknown even then is parked.
#include <algorithm>

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

// Blocks of a run that have a key besides the salt. They are stored such that they match no prompt: a miss, never a false hit.
class OpaqueBlocks {
public:
    // `is_prompt_start`: the run begins a prompt, so that its salt may be among the keys.
    OpaqueBlocks(const ExtraKey* extras, std::size_t count, bool is_prompt_start)
        : next_(extras), end_(extras + count), salt_(is_prompt_start ? salt_of_first(extras, count) : nullptr) {
        if (count != 0) count_extra(count);
    }

    // Return whether a block has such a key. Call it in the order of the blocks.
    bool contain(std::size_t block) {
        bool found = false;
        for (; next_ != end_ && next_->block <= block; ++next_) found = found || (next_->block == block && next_ != salt_);
        return found;
    }

private:
    const ExtraKey *next_, *end_, *const salt_;
};

}  // namespace

void Holder::apply(const Batch& batch, bool first, LockSlice& lock, Report& report) {
    lock_ = &lock;
    ++changes_;
    batch_ += first;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < batch.events.size(); ++i) {
        const Event& event = batch.events[i];
        if (event.kind != Event::Kind::Cleared) continue;
        apply_events(batch, begin, i, report);
        begin = i + 1;
        if (event.index != 0) {
            clear_tier(static_cast<u32>(event.index - 1), report);
        } else {
            drop_blocks();
            ++report.cleared;
        }
    }
    apply_events(batch, begin, batch.events.size(), report);
    while (const std::size_t blocks = parking_.expire_one(batch_)) lock_->count_changes(blocks);
    lock_ = nullptr;
}

void Holder::apply_events(const Batch& batch, std::size_t begin, std::size_t end, Report& report) {
    if (begin == end) return;
    if (batch.tokens.size() > kHashedAtOnce || batch.names.size() > kBlocksPerCount) {
        lock_->run_unlocked([&] { resolve_positions(batch, begin, end); });  // readers do not use the vectors that it writes
    } else {
        resolve_positions(batch, begin, end);
    }
    for (std::size_t i = begin; i < end; ++i) {
        const Event& event = batch.events[i];
        if (event.kind == Event::Kind::Stored) {
            store(batch, event.index, report);
            continue;
        }
        const Removed& removed = batch.removed[event.index];
        const std::optional<u32> ordinal = find_ordinal(removed.group);
        const std::vector<u32> candidates = removed.group ? std::vector<u32>() : candidate_groups();
        for (std::size_t n = 0; n < removed.names.count; ++n) {
            const u64 name = batch.names[removed.names.begin + n];
            std::optional<u32> copies;
            if (removed.copies.count != 0) copies = batch.copies[removed.copies.begin + n];
            const auto left = [&](u32 at) {
                const u32 slot = at * kTiers + removed.tier;
                return remove(name, slot, copies) || parking_.cancel(slot, name);
            };
            const bool known = (ordinal && left(*ordinal)) || std::any_of(candidates.begin(), candidates.end(), left);
            ++(known ? report.removed : report.unknown_removals);
            lock_->count_changes(1);
        }
    }
    const auto forget = [&] { batch_positions_ = {}; };
    batch_positions_.size() > kBlocksPerCount ? lock_->run_unlocked(forget) : forget();  // many take milliseconds
}

void Holder::resolve_positions(const Batch& batch, std::size_t begin, std::size_t end) {
    std::size_t runs = 0;
    bool has_no_tokens = false;
    for (std::size_t i = begin; i < end; ++i) {
        if (batch.events[i].kind != Event::Kind::Stored) continue;
        const Stored& event = batch.stored[batch.events[i].index];
        has_no_tokens = has_no_tokens || event.has_no_tokens();
        ++runs;
    }
    // Only other runs of the batch and parked runs need the positions of a run.
    keeps_positions_ = runs > 1 || !parking_.empty();
    if (positions_.size() < batch.names.size()) positions_.resize(batch.names.size());
    resolved_.assign(batch.stored.size(), false);
    for (std::size_t i = begin; has_no_tokens && i < end; ++i) {
        if (batch.events[i].kind == Event::Kind::Stored) keep_positions(batch, batch.stored[batch.events[i].index]);
    }
    for (std::size_t i = begin; i < end; ++i) {
        const std::size_t run = batch.events[i].index;
        if (batch.events[i].kind == Event::Kind::Stored && batch.stored[run].has_all_tokens()) resolve_run(batch, run);
    }
}

bool Holder::resolve_run(const Batch& batch, std::size_t run) {
    const Stored& event = batch.stored[run];
    const u64* names = batch.names.data() + event.names.begin;
    const ExtraKey* extras = batch.extras.data() + event.extras.begin;
    NamePosition* positions = positions_.data() + event.names.begin;
    std::size_t first = 0;
    NamePosition position;
    if (const std::optional<NamePosition> start = start_position(batch, event)) {
        position = *start;
    } else if (const std::optional<NamePosition> own = position_of(names[0])) {
        position = positions[0] = *own;
        first = 1;
    } else {
        return false;
    }
    const u32* tokens = batch.tokens.data() + event.tokens.begin;
    OpaqueBlocks opaque(extras, event.extras.count, !event.salt && position.end == 0);
    for (std::size_t i = first; i < event.names.count; ++i) {
        if (opaque.contain(i)) position.key = digester_.make_opaque(position.key);
        positions[i] = position = advance(position, tokens + i * event.block_size, event.block_size);
        if (i < kAhead) nodes_.prefetch(Nodes::hash(position.key, event.block_size));
        if (keeps_positions_) batch_positions_.insert_or_assign(names[i], position);
    }
    resolved_[run] = true;
    return true;
}

// Return the position where a run begins: the end of its parent; the end of the tokens skipped after an ancestor; or the
// start of a prompt, which some publishers send as parent 0.
std::optional<NamePosition> Holder::start_position(const Batch& batch, const Stored& event) const {
    const auto root = [&] {
        const ExtraKey* salt = salt_of_first(batch.extras.data() + event.extras.begin, event.extras.count);
        return NamePosition{start_digest(event.salt ? event.salt : salt ? salt->text : Text(), event.lora), 0};
    };
    if (!event.has_parent) return root();
    if (const std::optional<NamePosition> parent = position_of(event.parent)) return parent;
    if (event.skipped.count != 0) {
        const NamePosition start{start_digest(event.salt, event.lora), 0};
        const std::optional<NamePosition> from = event.has_ancestor ? position_of(event.ancestor) : start;
        if (!from) return std::nullopt;
        const u32* tokens = batch.skipped.data() + event.skipped.begin;
        return advance(*from, tokens, event.skipped.count);
    }
    if (event.parent == 0) return root();
    return std::nullopt;
}

// Return the block length of a run. A partial block of vLLM ends at a finer boundary than the full blocks before it, and
// begins where the last of these ends; any other block has the event's block size.
u32 Holder::block_length(const Stored& event, u32 slot) const {
    if (event.names.count != 1 || event.skipped.count == 0 || !event.has_ancestor) return event.block_size;
    const NameEntry* entry = find(event.ancestor, slot);
    const u64 full = entry == nullptr ? 0 : nodes_[entry->node].length;
    const u64 whole = event.skipped.count + event.block_size;
    return event.block_size < full && whole <= full ? static_cast<u32>(whole) : event.block_size;
}

u64 Holder::start_digest(const Text& salt, const Text& lora) const { return digester_.text(model->start, {salt, lora}); }

u32 Holder::update_group(const Stored& event) {
    const u32 at = ordinal(event.group);
    Group& group = groups[at];
    const bool other_kind = event.kind && !event.kind->empty() && group.kind != event.kind;
    const bool other_window = event.window && group.window != event.window;
    if (!group.announced || other_kind || other_window || group.block_size != event.block_size) {
        group.announced = true;
        if (other_kind) group.kind = std::string(*event.kind);
        if (other_window) group.window = event.window;
        if (other_kind || other_window) group.reclassify();
        group.block_size = event.block_size;
    }
    full_stores_ += group.is_full_attention();
    return at;
}

void Holder::store(const Batch& batch, std::size_t run, Report& report) {
    const Stored& event = batch.stored[run];
    if (event.has_no_tokens()) return store_copies(batch, event, report);
    std::optional<u32> inferred_group;
    if (!event.group) inferred_group = find_group(candidate_groups(), batch.names.data() + event.names.begin, event.names.count);
    const u32 ordinal = inferred_group ? *inferred_group : update_group(event);
    const u32 slot = ordinal * kTiers + event.tier;
    if (!inferred_group && !event.has_all_tokens()) groups[ordinal].sparse = true;
    const u32 length = block_length(event, slot);
    if (!has_room(ordinal, length, event.names.count)) {
        report.refused += event.names.count;
        return;
    }
    const bool is_resolved = resolved_[run] || (event.has_all_tokens() && resolve_run(batch, run));
    if (!is_resolved) return store_unresolved(batch, event, ordinal, slot, report);
    const u64* names = batch.names.data() + event.names.begin;
    const NamePosition* positions = positions_.data() + event.names.begin;
    const std::size_t count = event.names.count;
    for (std::size_t i = 0; i < count; ++i) {
        if (i + kAhead < count) {
            names_.prefetch(NameTraits::hash_of(names[i + kAhead]));
            nodes_.prefetch(Nodes::hash(positions[i + kAhead].key, length));
        }
        add(names[i], positions[i], slot, length);
        if ((i + 1) % kBlocksPerCount == 0) count_changed_blocks(kBlocksPerCount);
    }
    count_changed_blocks(count % kBlocksPerCount);
    report.stored += count;
    wake(names, count, report);
}

// Store a sparse run, or a dense one whose start is unknown: known names at once, and the others are parked.
void Holder::store_unresolved(const Batch& batch, const Stored& event, u32 ordinal, u32 slot, Report& report) {
    const u64* names = batch.names.data() + event.names.begin;
    const std::size_t count = event.names.count;
    const bool has_all_tokens = event.has_all_tokens();
    if (!has_all_tokens && count == 1 && groups[ordinal].role() == Role::State && !position_of(names[0]) &&
        std::none_of(groups.begin(), groups.end(), [](const Group& group) { return group.is_full_attention(); })) {
        resolve_last_block(batch, event, names[0]);
    }
    std::vector<std::optional<NamePosition>> positions(count);
    bool all = true;
    for (std::size_t i = 0; i < count; ++i) {
        positions[i] = position_of(names[i]);
        all = all && positions[i];
    }
    if (has_all_tokens && !all) {
        ParkedRun parked;
        parked.slot = slot;
        parked.names.assign(names, names + count);
        for (const auto& position : positions) parked.waits.push_back(!position);
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
    std::vector<u64> stored_names;
    for (std::size_t i = 0; i < count; ++i) {
        if (positions[i]) {
            add(names[i], *positions[i], slot, event.block_size);
            stored_names.push_back(names[i]);
            count_changed_blocks(1);
        } else if (!has_all_tokens) {
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
    report.stored += stored_names.size();
    wake(stored_names.data(), stored_names.size(), report);
}

void Holder::park(ParkedRun run) {
    if (run.names.size() > kParkedBlocksMax) return;
    lock_->count_changes(run.names.size());
    parking_.park(std::move(run));
    while (const std::size_t blocks = parking_.evict_one()) lock_->count_changes(blocks);
}

// Resolve the one name of a state event as the end of the event's tokens, for models without full attention.
void Holder::resolve_last_block(const Batch& batch, const Stored& event, u64 name) {
    const std::optional<NamePosition> start = start_position(batch, event);
    if (!start) return;
    const u32* tokens = batch.tokens.data() + event.tokens.begin;
    batch_positions_.insert_or_assign(name, advance(*start, tokens, event.tokens.count));
}

// Store the parked runs that waited for `names`, and those that waited for the names of these runs.
void Holder::wake(const u64* names, std::size_t count, Report& report) {
    if (parking_.empty()) return;
    std::vector<u64> stack(names, names + count);
    while (!stack.empty()) {
        const u64 name = stack.back();
        stack.pop_back();
        while (const std::optional<ParkedRun> run = parking_.release(name)) {
            const std::vector<u64> attached = attach(*run);
            stack.insert(stack.end(), attached.begin(), attached.end());
            report.stored += attached.size();
            lock_->count_changes(run->names.size() - attached.size() + run->tokens.size() / 64);
        }
    }
}

std::vector<u64> Holder::attach(const ParkedRun& run) {
    if (!has_room(run.slot / kTiers, run.length, run.names.size())) return {};
    if (run.is_run) {
        std::size_t first = 0;
        std::optional<NamePosition> position = position_of(run.awaits);
        if (!position) position = position_of(run.names[0]), first = 1;
        OpaqueBlocks opaque(run.extras.data(), run.extras.size(), false);
        for (std::size_t i = first; position && i < run.names.size(); ++i) {
            if (opaque.contain(i)) position->key = digester_.make_opaque(position->key);
            position = advance(*position, run.tokens.data() + i * run.length, run.length);
            batch_positions_.insert_or_assign(run.names[i], *position);
        }
    }
    std::vector<u64> attached;
    for (std::size_t i = 0; i < run.names.size(); ++i) {
        const std::optional<NamePosition> position = position_of(run.names[i]);
        if (!run.waits[i] || !position) continue;
        add(run.names[i], *position, run.slot, run.length);
        attached.push_back(run.names[i]);
        if (attached.size() % kBlocksPerCount == 0) count_changed_blocks(kBlocksPerCount);
    }
    count_changed_blocks(attached.size() % kBlocksPerCount);
    return attached;
}

void Holder::load(const DumpPart& part, LockSlice& lock, Report& report) {
    const auto is_possible = [](const DumpRow& row) {
        return row.key < kPrime && row.end >> 32 == 0 && row.length - 1 < kBlockSizeMax && row.copies - 1 < kCopiesMax;
    };
    const bool has_same_seed = part.fingerprint == digester_.fingerprint();
    if (!has_same_seed || part.tier >= kTiers || part.rows.size() > kNamesMax ||
        !std::all_of(part.rows.begin(), part.rows.end(), is_possible)) {
        ++report.malformed_events;
        report.malformed.push_back(has_same_seed ? "a dump has a row that is out of range, or too many rows"
                                                 : "the dump is of another seed: this index cannot use it");
        return;
    }
    lock_ = &lock;
    ++changes_;
    const u32 at = ordinal(part.group.key);
    Group& group = groups[at];
    group.announced = group.announced || part.group.announced;
    group.sparse = group.sparse || part.group.sparse;
    group.describe(part.group);
    std::vector<u64> names;
    for (const DumpRow& row : part.rows) {
        if (!has_room(at, static_cast<u32>(row.length), 1)) {
            ++report.refused;
            continue;
        }
        add(row.name, NamePosition{row.key, row.end}, at * kTiers + part.tier, static_cast<u32>(row.length),
            reannounces ? 1 : static_cast<u32>(row.copies));
        count_changed_blocks(1);
        names.push_back(row.name);
    }
    wake(names.data(), names.size(), report);
    report.stored += names.size();
    batch_positions_ = {};
    lock_ = nullptr;
}

}  // namespace blockcast
