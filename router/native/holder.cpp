#include "holder.hpp"

#include <algorithm>

namespace blockcast {

namespace {

constexpr std::size_t kStartsMax = 4096;

bool is_full_attention(const std::string& kind) {
    return kind == "full_attention" || kind == "mla_attention" || kind == "sink_full_attention";
}

// vLLM puts the salt behind the media keys of a prompt's first block: the last plain text.
const ExtraKey* salt_of_first(const ExtraKey* extras, std::size_t count) {
    const ExtraKey* salt = nullptr;
    for (std::size_t i = 0; i < count; ++i) {
        if (extras[i].block == 0 && extras[i].is_text) salt = &extras[i];
    }
    return salt;
}

// What block `block`, whose first token stands at `start`, mixes in (router/index_events.py: media_of).
void media_of(const ExtraKey* extras, std::size_t count, u32 block, u64 start, bool event_salt, std::vector<Media>& out) {
    out.clear();
    const ExtraKey* salt = start == 0 && block == 0 && !event_salt ? salt_of_first(extras, count) : nullptr;
    for (std::size_t i = 0; i < count; ++i) {
        const ExtraKey& key = extras[i];
        if (key.block != block || &key == salt) continue;
        if (!key.positioned) {
            out.push_back(Media{start, key.opaque});
        } else if (key.offset >= 0) {
            out.push_back(Media{start + static_cast<u64>(key.offset), key.media});
        }
    }
    std::stable_sort(out.begin(), out.end(), [](const Media& a, const Media& b) { return a.position < b.position; });
}

}  // namespace

// -- groups -----------------------------------------------------------------------------------------------------------

void Group::reclassify() {
    const std::string name = kind.value_or("");
    teaches_ = !kind || is_full_attention(name);
    if (name == "encoder_only_attention" || name == "cross_attention") {
        role_ = Role::Ignored;
    } else if (name == "mamba") {
        role_ = Role::State;
    } else if (window && (name == "sliding_window" || name == "sliding_window_mla")) {
        role_ = Role::Window;
    } else if (window && name == "chunked_local_attention") {
        role_ = Role::Chunk;
    } else {
        role_ = Role::Full;
    }
}

bool Group::count(u32 length, int by) {
    const auto at = std::lower_bound(lengths.begin(), lengths.end(), std::make_pair(length, u64{0}));
    if (at == lengths.end() || at->first != length) {
        lengths.insert(at, {length, static_cast<u64>(by)});
        return true;
    }
    at->second += static_cast<u64>(static_cast<std::int64_t>(by));
    if (at->second != 0) return false;
    lengths.erase(at);
    return true;
}

u64 Group::names() const {
    u64 sum = 0;
    for (const auto& [length, names] : lengths) sum += names;
    return sum;
}

std::optional<u32> Holder::find_ordinal(const std::optional<std::int64_t>& key) const {
    for (u32 i = 0; i < groups.size(); ++i) {
        if (groups[i].key == key) return i;
    }
    return std::nullopt;
}

u32 Holder::ordinal(const std::optional<std::int64_t>& key) {
    if (const std::optional<u32> known = find_ordinal(key)) return *known;
    // More groups than slots can tell apart: nobody has so many; the last one takes the rest.
    if (groups.size() == kGroupsMax) return kGroupsMax - 1;
    groups.emplace_back().key = key;
    return static_cast<u32>(groups.size() - 1);
}

void Holder::declare(const std::vector<Group>& declared) {
    for (Group& group : groups) group.declared = false;
    for (const Group& from : declared) {
        Group& group = groups[ordinal(from.key)];
        group.declared = true;
        if (from.kind && !from.kind->empty()) group.kind = from.kind;
        if (from.block_size.value_or(0)) group.block_size = from.block_size;
        if (from.window.value_or(0)) group.window = from.window;
        group.reclassify();
    }
    full_stores_ = 0;
}

u32 Holder::cut() const {
    u64 held = 0, told = 0;
    for (const Group& group : groups) {
        if (!demands(group)) continue;
        if (group.role() == Role::Full && !group.lengths.empty()) {
            const u64 least = group.lengths.front().first;
            held = held == 0 ? least : std::min(held, least);
        }
        if (group.block_size) told = told == 0 ? *group.block_size : std::min(told, *group.block_size);
    }
    return static_cast<u32>(held != 0 ? held : told != 0 ? told : 16);
}

// A run of blocks goes into one slot with one length: they are counted together, by `settle`.
void Holder::count_fresh(u32 slot, u32 length) {
    if (fresh_ != 0 && (fresh_slot_ != slot || fresh_length_ != length)) settle();
    fresh_slot_ = slot;
    fresh_length_ = length;
    ++fresh_;
}

void Holder::settle() {
    if (fresh_ == 0) return;
    entries_ += fresh_;
    adjust_length(fresh_slot_, fresh_length_, static_cast<int>(fresh_));
    fresh_ = 0;
}

void Holder::count_length(u32 slot, u32 length, int by) {
    settle();
    adjust_length(slot, length, by);
}

void Holder::adjust_length(u32 slot, u32 length, int by) {
    if (!groups[slot / kTiers].count(length, by)) return;
    u64& users = model->lengths[length];
    by > 0 ? ++users : --users;
    if (users == 0) model->lengths.erase(length);
}

// -- clearing ---------------------------------------------------------------------------------------------------------

void Holder::forget_blocks() {
    settle();
    parking_.clear();
    for (Group& group : groups) {
        for (const auto& [length, names] : group.lengths) {
            if (--model->lengths[length] == 0) model->lengths.erase(length);
        }
        group.lengths.clear();
    }
    entries_ = 0;
    if (names_.size() == 0) return;
    seats_.retire(Estate{std::move(names_), std::move(links_), seat});
    seat = seats_.take(this);
}

void Holder::clear() {
    forget_blocks();
    std::vector<Group> kept;
    for (Group& group : groups) {
        group.heard = group.sparse = false;
        if (group.declared) kept.push_back(group);
    }
    groups = std::move(kept);
    full_stores_ = 0;
}

void Holder::leave() {
    forget_blocks();
    seats_.retire(Estate{SegmentedTable<NameEntry, NameTraits>(pages_), Pool<Link>(), seat});
}

// -- names ------------------------------------------------------------------------------------------------------------

NameEntry* Holder::find(u64 name) const {
    return names_.find(NameTraits::hash_of(name), [&](const NameEntry& entry) { return entry.name == name; });
}

std::optional<Place> Holder::place_of(u64 name) const {
    if (const Place* place = taught_.get(name)) return *place;
    const NameEntry* entry = find(name);
    if (entry == nullptr) return std::nullopt;
    return Place{nodes_[entry->node].key, nodes_[entry->node].end};
}

void Holder::add(u64 name, const Place& place, u32 slot, u32 length) {
    NameEntry* entry = find(name);
    if (entry != nullptr && (nodes_[entry->node].key != place.key || nodes_[entry->node].end != place.end)) {
        forget_name(entry);  // the engine gave the name to another block: the newest word counts
        entry = nullptr;
    }
    const auto first_in_slot = [&] {
        count_fresh(slot, length);
        return nodes_.add(place.key, static_cast<u32>(place.end), length, seat, slot);
    };
    if (entry == nullptr) {
        const u32 node = first_in_slot();
        names_.insert(NameEntry{name, node, slot << 23 | 1});
    } else if ((entry->meta & kMany) == 0) {
        if (slot_of(entry->meta) == slot) return again(entry->node, entry->meta, place, slot, length);
        const u32 other = links_.allocate(), own = links_.allocate();
        links_[other] = Link{entry->node, entry->meta, 0};
        links_[own] = Link{first_in_slot(), slot << 23 | 1, other};
        entry->node = links_[own].node;
        entry->meta = kMany | own;
    } else {
        for (u32 at = entry->meta & ~kMany; at != 0; at = links_[at].next) {
            if (slot_of(links_[at].meta) != slot) continue;
            again(links_[at].node, links_[at].meta, place, slot, length);
            entry->node = links_[entry->meta & ~kMany].node;
            return;
        }
        const u32 own = links_.allocate();
        links_[own] = Link{first_in_slot(), slot << 23 | 1, entry->meta & ~kMany};
        entry->node = links_[own].node;
        entry->meta = kMany | own;
    }
}

// The name is stored in the slot already: another copy, or the same block announced with another length.
void Holder::again(u32& node, u32& meta, const Place& place, u32 slot, u32 length) {
    const u32 before = nodes_[node].length;
    if (before != length) {
        const u32 moved = nodes_.add(place.key, static_cast<u32>(place.end), length, seat, slot);
        nodes_.remove(node, seat, slot);
        node = moved;
        count_length(slot, before, -1);
        count_length(slot, length, +1);
    }
    if (!reannounces && (meta & kCopies) != kCopies) ++meta;
}

bool Holder::remove(u64 name, u32 slot) {
    NameEntry* entry = find(name);
    if (entry == nullptr) return false;
    const auto last_in_slot = [&](u32 node) {
        --entries_;
        count_length(slot, nodes_[node].length, -1);
        nodes_.remove(node, seat, slot);
    };
    if ((entry->meta & kMany) == 0) {
        if (slot_of(entry->meta) != slot) return false;
        if ((entry->meta & kCopies) > 1) return --entry->meta, true;
        last_in_slot(entry->node);
        names_.erase(entry);
        return true;
    }
    const u32 head = entry->meta & ~kMany;
    for (u32 before = 0, at = head; at != 0; before = at, at = links_[at].next) {
        if (slot_of(links_[at].meta) != slot) continue;
        if ((links_[at].meta & kCopies) > 1) return --links_[at].meta, true;
        last_in_slot(links_[at].node);
        const u32 after = links_[at].next;
        links_.free(at);
        if (before != 0) {
            links_[before].next = after;
        } else if (after != 0) {
            entry->meta = kMany | after;
            entry->node = links_[after].node;
        } else {
            names_.erase(entry);
        }
        return true;
    }
    return false;
}

void Holder::forget_name(NameEntry* entry) {
    each_slot(*entry, links_, [&](u32 node, u32 meta) {
        --entries_;
        count_length(slot_of(meta), nodes_[node].length, -1);
        nodes_.remove(node, seat, slot_of(meta));
    });
    if (entry->meta & kMany) {
        for (u32 at = entry->meta & ~kMany; at != 0;) {
            const u32 next = links_[at].next;
            links_.free(at);
            at = next;
        }
    }
    names_.erase(entry);
}

// -- events -----------------------------------------------------------------------------------------------------------

void Holder::apply(const Batch& batch, Report& report) {
    ++batch_;
    std::size_t begin = 0;
    for (std::size_t i = 0; i < batch.events.size(); ++i) {
        const Event& event = batch.events[i];
        if (event.kind != Event::Kind::Cleared && event.kind != Event::Kind::Digests) continue;
        apply_stretch(batch, begin, i, report);
        begin = i + 1;
        if (event.kind == Event::Kind::Cleared) {
            forget_blocks();
            ++report.cleared;
        } else {
            load(batch.digests[event.index], report);
        }
    }
    apply_stretch(batch, begin, batch.events.size(), report);
    parking_.expire(batch_);
}

void Holder::apply_stretch(const Batch& batch, std::size_t begin, std::size_t end, Report& report) {
    if (begin == end) return;
    teach(batch, begin, end);
    for (std::size_t i = begin; i < end; ++i) {
        const Event& event = batch.events[i];
        if (event.kind == Event::Kind::Stored) {
            store(batch, event.index, report);
            continue;
        }
        const Removed& removed = batch.removed[event.index];
        const std::optional<u32> ordinal = find_ordinal(removed.group);
        const u32 slot = ordinal.value_or(0) * kTiers + removed.tier;
        for (std::size_t n = 0; n < removed.names.count; ++n) {
            const u64 name = batch.names[removed.names.begin + n];
            const bool known = ordinal && (remove(name, slot) || parking_.cancel(slot, name));
            ++(known ? report.removed : report.unknown_removals);
        }
    }
    taught_.end();
}

void Holder::teach(const Batch& batch, std::size_t begin, std::size_t end) {
    std::size_t names = 0, runs = 0;
    std::vector<std::size_t> open;
    for (std::size_t i = begin; i < end; ++i) {
        if (batch.events[i].kind != Event::Kind::Stored) continue;
        names += batch.stored[batch.events[i].index].names.count;
        ++runs;
    }
    taught_.clear(names);
    // What a lone run spells out is used by nobody else in the batch, except by what it may set free.
    teaching_ = runs > 1 || !parking_.empty();
    if (places_.size() < batch.names.size()) places_.resize(batch.names.size());
    resolved_.assign(batch.stored.size(), false);
    for (std::size_t i = begin; i < end; ++i) {
        const std::size_t run = batch.events[i].index;
        if (batch.events[i].kind != Event::Kind::Stored || !batch.stored[run].dense()) continue;
        if (!teach_run(batch, run)) open.push_back(run);
    }
    for (std::size_t before = ~std::size_t{0}; !open.empty() && open.size() != before;) {
        before = open.size();
        open.erase(std::remove_if(open.begin(), open.end(), [&](std::size_t run) { return teach_run(batch, run); }),
                   open.end());
    }
}

bool Holder::teach_run(const Batch& batch, std::size_t run) {
    const Stored& event = batch.stored[run];
    const u64* names = batch.names.data() + event.names.begin;
    const ExtraKey* extras = batch.extras.data() + event.extras.begin;
    Place* places = places_.data() + event.names.begin;
    std::size_t first = 0;
    Place place;
    if (!event.has_parent) {
        const ExtraKey* salt = salt_of_first(extras, event.extras.count);
        place = Place{start_digest(event.salt ? event.salt : salt ? Text(salt->text) : Text(), event.lora), 0};
    } else if (const std::optional<Place> parent = place_of(event.parent)) {
        place = *parent;
    } else if (const std::optional<Place> own = place_of(names[0])) {
        place = places[0] = *own;
        first = 1;
    } else {
        return false;
    }
    const u32* tokens = batch.tokens.data() + event.tokens.begin;
    std::vector<Media> media;
    for (std::size_t i = first; i < event.names.count; ++i) {
        if (event.extras.count != 0) {
            media_of(extras, event.extras.count, static_cast<u32>(i), place.end, event.salt.has_value(), media);
        }
        place.key = digester_.extend(place.key, tokens + i * event.block_size, event.block_size, place.end, media.data(),
                                     media.size());
        place.end += event.block_size;
        places[i] = place;
        if (teaching_) taught_.put(names[i], place);
    }
    resolved_[run] = true;
    return true;
}

u64 Holder::start_digest(const Text& salt, const Text& lora) {
    std::string scope = salt ? "s" + std::string(*salt) : "n";
    scope += lora ? std::string("\0l", 2) + std::string(*lora) : std::string("\0n", 2);
    const auto known = model->starts.find(scope);
    if (known != model->starts.end()) return known->second;
    const u64 start = digester_.text({Text(model->name), salt, lora});
    if (model->starts.size() >= kStartsMax) model->starts.clear();
    model->starts.emplace(std::move(scope), start);
    return start;
}

u32 Holder::hear(const Stored& event) {
    const u32 at = ordinal(event.group);
    Group& group = groups[at];
    group.heard = true;
    const bool other_kind = event.kind && !event.kind->empty() && group.kind != event.kind;
    const bool other_window = event.window && group.window != event.window;
    if (other_kind) group.kind = std::string(*event.kind);
    if (other_window) group.window = event.window;
    if (other_kind || other_window) group.reclassify();
    group.block_size = event.block_size;
    if (group.teaches()) ++full_stores_;
    return at;
}

void Holder::store(const Batch& batch, std::size_t run, Report& report) {
    const Stored& event = batch.stored[run];
    const u32 ordinal = hear(event);
    const u32 slot = ordinal * kTiers + event.tier;
    if (!event.dense()) groups[ordinal].sparse = true;
    if (!resolved_[run]) return store_unresolved(batch, event, ordinal, slot, report);
    const u64* names = batch.names.data() + event.names.begin;
    const Place* places = places_.data() + event.names.begin;
    const std::size_t count = event.names.count;
    const u32 length = event.block_size;
    // Each block touches two random places in memory: ask for a window of them before the first is needed.
    constexpr std::size_t kAhead = 16;
    for (std::size_t at = 0; at < count; at += kAhead) {
        const std::size_t until = std::min(count, at + kAhead);
        for (std::size_t i = at; i < until; ++i) {
            names_.prefetch(NameTraits::hash_of(names[i]));
            nodes_.prefetch(Nodes::hash(places[i].key, length));
        }
        for (std::size_t i = at; i < until; ++i) add(names[i], places[i], slot, length);
    }
    settle();
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
    std::vector<std::optional<Place>> places(count);
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
        parking_.park(std::move(parked));
    }
    std::vector<u64> placed;
    for (std::size_t i = 0; i < count; ++i) {
        if (places[i]) {
            add(names[i], *places[i], slot, event.block_size);
            placed.push_back(names[i]);
        } else if (!dense) {
            ParkedRun parked;
            parked.slot = slot;
            parked.names = {names[i]};
            parked.waits = {true};
            parked.length = event.block_size;
            parked.awaits = names[i];
            parked.batch = batch_;
            parking_.park(std::move(parked));
            ++report.parked;
        }
    }
    settle();
    report.stored += placed.size();
    wake(placed.data(), placed.size());
}

// A state event with one hash names the end of its tokens; for models without full attention to say so.
void Holder::place_last(const Batch& batch, const Stored& event, u64 name) {
    Place start;
    const ExtraKey* extras = batch.extras.data() + event.extras.begin;
    if (event.has_parent) {
        const std::optional<Place> parent = place_of(event.parent);
        if (!parent) return;
        start = *parent;
    } else {
        const ExtraKey* salt = salt_of_first(extras, event.extras.count);
        start = Place{start_digest(event.salt ? event.salt : salt ? Text(salt->text) : Text(), event.lora), 0};
    }
    const u32* tokens = batch.tokens.data() + event.tokens.begin;
    taught_.put(name, Place{digester_.extend(start.key, tokens, event.tokens.count), start.end + event.tokens.count});
}

// The places of `names` are known now: attach what waited for them, and what waited for that.
void Holder::wake(const u64* names, std::size_t count) {
    if (parking_.empty()) return;
    std::vector<u64> stack(names, names + count);
    while (!stack.empty()) {
        const u64 name = stack.back();
        stack.pop_back();
        for (const ParkedRun& run : parking_.release(name)) {
            const std::vector<u64> attached = attach(run);
            stack.insert(stack.end(), attached.begin(), attached.end());
        }
    }
}

std::vector<u64> Holder::attach(const ParkedRun& run) {
    if (run.is_run) {
        std::size_t first = 0;
        std::optional<Place> place = place_of(run.awaits);
        if (!place) place = place_of(run.names[0]), first = 1;
        std::vector<Media> media;
        for (std::size_t i = first; place && i < run.names.size(); ++i) {
            media_of(run.extras.data(), run.extras.size(), static_cast<u32>(i), place->end, true, media);
            place = Place{digester_.extend(place->key, run.tokens.data() + i * run.length, run.length, place->end,
                                           media.data(), media.size()),
                          place->end + run.length};
            taught_.put(run.names[i], *place);
        }
    }
    std::vector<u64> attached;
    for (std::size_t i = 0; i < run.names.size(); ++i) {
        const std::optional<Place> place = place_of(run.names[i]);
        if (!run.waits[i] || !place) continue;
        add(run.names[i], *place, run.slot, run.length);
        attached.push_back(run.names[i]);
    }
    settle();
    return attached;
}

void Holder::load(const Digests& digests, Report& report) {
    if (digests.fingerprint != digester_.fingerprint()) {
        report.malformed.push_back("BlockDigests.fingerprint is of another seed: this index cannot use it");
        return;
    }
    const u32 at = ordinal(digests.group);
    Group& group = groups[at];
    group.heard = true;
    if (digests.kind && !digests.kind->empty()) group.kind = std::string(*digests.kind);
    if (digests.block_size.value_or(0)) group.block_size = digests.block_size;
    if (digests.window.value_or(0)) group.window = digests.window;
    group.sparse = group.sparse || digests.sparse;
    group.reclassify();
    taught_.clear(0);
    std::vector<u64> names;
    for (const DigestRow& row : digests.rows) {
        for (u64 copy = 0; copy < row.copies; ++copy) {
            add(row.name, Place{row.key, row.end}, at * kTiers + digests.tier, static_cast<u32>(row.length));
        }
        settle();
        names.push_back(row.name);
    }
    wake(names.data(), names.size());
    report.stored += digests.rows.size();
    taught_.end();
}

// -- seats and scratch ------------------------------------------------------------------------------------------------

Seat Seats::take(Holder* owner) {
    if (!free_.empty()) {
        const Seat seat = free_.back();
        free_.pop_back();
        owners_[seat] = owner;
        return seat;
    }
    if (owners_.size() > kSeatMax) throw std::length_error("the index is full: too many holders");
    owners_.push_back(owner);
    return static_cast<Seat>(owners_.size() - 1);
}

void Seats::retire(Estate estate) {
    owners_[estate.seat] = nullptr;
    estates_.push_back(std::move(estate));
}

bool Seats::settle_some() {
    if (estates_.empty()) return false;
    Estate& estate = estates_.back();
    const bool more = estate.names.drain_some([&](const NameEntry& entry) {
        Holder::each_slot(entry, estate.links, [&](u32 node, u32 meta) {
            nodes_.remove(node, estate.seat, Holder::slot_of(meta));
        });
    });
    if (more) return true;
    free_.push_back(estate.seat);
    estates_.pop_back();
    return !estates_.empty();
}

std::size_t Seats::bytes() const {
    std::size_t sum = owners_.capacity() * sizeof(Holder*);
    for (const Estate& estate : estates_) sum += estate.names.bytes() + estate.links.bytes();
    return sum;
}

void Taught::clear(std::size_t names) {
    names_ = 0;
    ++epoch_;
    while (entries_.size() < 2 * names + 16) grow();
}

void Taught::grow() {
    std::vector<Entry> old(entries_.empty() ? 32 : entries_.size() * 2, Entry{0, {}, 0});
    old.swap(entries_);
    shift_ = 64 - static_cast<u32>(__builtin_ctzll(entries_.size()));
    names_ = 0;
    for (const Entry& entry : old) {
        if (entry.epoch == epoch_) put(entry.name, entry.place);
    }
}

void Taught::put(u64 name, const Place& place) {
    if (2 * names_ + 16 > entries_.size()) grow();
    for (std::size_t at = home(name);; at = (at + 1) & (entries_.size() - 1)) {
        Entry& entry = entries_[at];
        if (entry.epoch == epoch_ && entry.name != name) continue;
        names_ += entry.epoch != epoch_;
        entry = Entry{name, place, epoch_};
        return;
    }
}

const Place* Taught::get(u64 name) const {
    if (names_ == 0) return nullptr;
    for (std::size_t at = home(name);; at = (at + 1) & (entries_.size() - 1)) {
        const Entry& entry = entries_[at];
        if (entry.epoch != epoch_) return nullptr;
        if (entry.name == name) return &entry.place;
    }
}

}  // namespace blockcast
