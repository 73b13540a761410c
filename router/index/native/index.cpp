#include "index.hpp"

#include <algorithm>

#include "match.hpp"

namespace blockcast {

Holder* Index::get(u64 holder) const {
    const auto found = holders_.find(holder);
    if (found == holders_.end()) {
        throw UnknownHolder("holder " + std::to_string(holder) + " is not in the index (removed?)");
    }
    return found->second.get();
}

Query Index::make_query(const Tokens& prompt, const Scope& scope) const {
    const u64 start = digester_.text({Text(scope.model), scope.salt, scope.lora});
    return Query{prompt.data, prompt.count, start, prompt.memo};
}

u64 Index::add_holder(const std::string& model) {
    const std::lock_guard writer(ingest_mutex_);
    const std::unique_lock lock(mutex_);
    auto& entry = models_[model];
    if (!entry) {
        entry = std::make_unique<ModelHolders>();
        entry->name = model;
        entry->start = digester_.text(3, {Text(model)});
    }
    const u64 id = next_holder_++;
    auto holder = std::make_unique<Holder>(id, entry.get(), digester_, pages_, nodes_, seats_, removed_blocks_);
    entry->classify(holder.get());
    holders_.emplace(id, std::move(holder));
    return id;
}

void Index::remove_holder(u64 id) {
    const std::lock_guard writer(ingest_mutex_);
    const std::unique_lock lock(mutex_);
    Holder* holder = get(id);
    for (auto pin = pins_.begin(); pin != pins_.end();) {
        if (pin->second.holder == holder) {
            remove_pin(pin->second);
            pin = pins_.erase(pin);
        } else {
            ++pin;
        }
    }
    holder->detach();
    const auto model = models_.find(holder->model->name);
    model->second->remove(holder);
    holders_.erase(id);
    if (model->second->empty()) models_.erase(model);
}

void Index::clear(u64 holder) {
    const std::lock_guard writer(ingest_mutex_);
    const std::unique_lock lock(mutex_);
    get(holder)->clear();
    move_pins(*get(holder));
    reclassify(get(holder));
}

void Index::declare_groups(u64 holder, const std::vector<Group>& groups) {
    const std::unique_lock lock(mutex_);
    get(holder)->declare(groups);
    reclassify(get(holder));
}

void Index::set_reannounces(u64 holder, bool reannounces) {
    const std::unique_lock lock(mutex_);
    get(holder)->reannounces = reannounces;
}

bool Index::step(Ingest& ingest) {
    const std::lock_guard writer(ingest_mutex_);
    Holder* holder = get(ingest.holder);
    const bool first = ingest.cursor.at == 0 && !ingest.cursor.whole;
    decode(ingest.payload, ingest.size, digester_, batch_, ingest.cursor);
    Report& report = ingest.report;
    report.unknown_events += batch_.unknown;
    report.malformed_events += batch_.malformed_events;
    for (std::string& what : batch_.malformed) {
        if (report.malformed.size() < kMalformedKept) report.malformed.push_back(std::move(what));
    }
    LockSlice lock(mutex_);
    const Seat seat = holder->seat;
    removed_blocks_.now_s = ingest.now_s;
    holder->apply(batch_, first, lock, report);
    if (holder->seat != seat) move_pins(*holder);
    reclassify(holder);
    seats_.clean_up_segment();
    return !ingest.cursor.done;
}

Report Index::ingest(u64 holder, const u8* payload, std::size_t size, double now_s) {
    Ingest ingest{holder, payload, size, now_s};
    while (step(ingest)) {
    }
    return std::move(ingest.report);
}

Dump Index::begin_dump(u64 holder) const {
    const std::shared_lock lock(mutex_);
    return Dump{holder, get(holder)->changes()};
}

std::vector<DumpPart> Index::step(Dump& dump) const {
    const std::shared_lock lock(mutex_);
    const Holder& holder = *get(dump.holder);
    if (holder.changes() != dump.changes) {
        throw UnknownHolder("holder " + std::to_string(dump.holder) + " has changed since its dump began");
    }
    std::map<u32, std::vector<DumpRow>> rows;  // by slot
    for (u32 i = 0; dump.part == 0 && i < holder.groups.size(); ++i) {
        if (holder.groups[i].announced) rows[i * kTiers];  // also where it holds nothing
    }
    for (std::size_t count = 0; !dump.done && count < kDumpedAtOnce;) {
        dump.done = !holder.each_name(dump.part++, [&](u64 name, u32 node, u32 slot, u32 copies) {
            const Node& at = nodes_[node];
            rows[slot].push_back(DumpRow{name, at.key, at.end, at.length, std::min<u64>(copies, kCopiesMax)});
            ++count;
        });
    }
    std::vector<DumpPart> parts;
    for (auto& [slot, of_slot] : rows) {
        parts.push_back(DumpPart{digester_.fingerprint(), holder.groups[slot / kTiers], slot % kTiers, std::move(of_slot)});
    }
    return parts;
}

Report Index::load(u64 id, const DumpPart& part) {
    const std::lock_guard writer(ingest_mutex_);
    Holder* holder = get(id);
    Report report;
    LockSlice lock(mutex_);
    holder->load(part, lock, report);
    reclassify(holder);
    return report;
}

std::vector<Match> Index::match(const Tokens& prompt, const Scope& scope) const {
    const std::shared_lock lock(mutex_);
    const auto model = models_.find(scope.model);
    if (model == models_.end()) return {};
    return match_all(make_query(prompt, scope), *model->second, digester_, nodes_, seats_, pinned_blocks_);
}

std::vector<u64> Index::chunk_keys(const Tokens& prompt, const Scope& scope, u64 chunk) const {
    const Query query = make_query(prompt, scope);
    Prefixes prefixes(query, digester_, chunk);
    std::vector<u64> keys;
    for (u64 end = chunk; end < prompt.count; end += chunk) keys.push_back(prefixes.at(end));
    return keys;
}

std::optional<RemovedPrefix> Index::find_removed(const Tokens& prompt, const Scope& scope, u64 start, u64 step) const {
    const Query query = make_query(prompt, scope);
    Prefixes prefixes(query, digester_, step);
    const std::shared_lock lock(mutex_);
    std::optional<RemovedPrefix> found;
    for (u64 end = start - start % step + step; end < prompt.count; end += step) {
        const std::optional<RemovedPrefix> left = removed_blocks_.find(prefixes.at(end));
        if (!left) break;
        if (!found) found = left;
        found->end = end;
    }
    return found;
}

u64 Index::pin(u64 id, const Tokens& prompt, const Scope& scope) {
    const Query query = make_query(prompt, scope);
    const std::unique_lock lock(mutex_);
    Holder* holder = get(id);
    const u32 pin_length = holder->pin_length();
    Pin pin{holder, holder->seat, pin_length, {}, std::nullopt};
    Prefixes prefixes(query, digester_, pin_length);
    const u64 count = prompt.count / pin_length, stride = pin_length / prefixes.unit();
    const u64* const keys = prefixes.up_to(count * stride);
    if (stride == 1) {
        pin.boundaries.assign(keys + 1, keys + 1 + count);
    } else {
        pin.boundaries.resize(count);
        for (u64 i = 0; i < count; ++i) pin.boundaries[i] = keys[(i + 1) * stride];
    }
    const u64 last = prompt.count == 0 ? 0 : (prompt.count - 1) / pin_length;
    if (last > 0) pin.checkpoint = pin.boundaries[last - 1];
    pinned_blocks_.add(pin.boundaries, pin.checkpoint, pin.seat, pin_length);
    if (++static_cast<ModelHolders*>(holder->model)->pins[holder] == 1) reclassify(holder);
    const u64 number = next_pin_++;
    pins_.emplace(number, std::move(pin));
    return number;
}

void Index::unpin(u64 number) {
    const std::unique_lock lock(mutex_);
    const auto found = pins_.find(number);
    if (found == pins_.end()) return;
    remove_pin(found->second);
    pins_.erase(found);
}

void Index::move_pins(const Holder& holder) {
    const auto& pinned = static_cast<const ModelHolders*>(holder.model)->pins;
    if (pinned.count(&holder) == 0) return;
    for (auto& [number, pin] : pins_) {
        if (pin.holder != &holder || pin.seat == holder.seat) continue;
        pinned_blocks_.remove(pin.boundaries, pin.checkpoint, pin.seat, pin.pin_length);
        pin.seat = holder.seat;
        pinned_blocks_.add(pin.boundaries, pin.checkpoint, pin.seat, pin.pin_length);
    }
}

void Index::remove_pin(const Pin& pin) {
    pinned_blocks_.remove(pin.boundaries, pin.checkpoint, pin.seat, pin.pin_length);
    auto& pins = static_cast<ModelHolders*>(pin.holder->model)->pins;
    if (--pins[pin.holder] != 0) return;
    pins.erase(pin.holder);
    reclassify(pin.holder);
}

void Index::reclassify(const Holder* holder) {
    static_cast<ModelHolders*>(holder->model)->classify(holder);
}

Stats Index::stats() const {
    const std::shared_lock lock(mutex_);
    Stats stats{holders_.size(), 0, 0, pins_.size(), 0, nodes_.size()};
    stats.bytes = pages_.bytes() + pin_pages_.bytes() + nodes_.bytes() + seats_.bytes() + pinned_blocks_.bytes() + removed_blocks_.bytes();
    for (const auto& [id, holder] : holders_) {
        stats.entries += holder->entries();
        stats.parked += holder->parked();
        stats.bytes += holder->bytes();
    }
    for (const auto& [id, pin] : pins_) stats.bytes += pin.boundaries.capacity() * sizeof(u64) + 64;
    return stats;
}

}  // namespace blockcast
