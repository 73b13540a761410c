// Runs that wait for a name. All searches use ordered trees, so that no choice of names makes them slow.
#include "holder.hpp"

namespace blockcast {

void Parking::clear() {
    runs_.clear();
    awaited_.clear();
    names_.clear();
    blocks_ = bytes_ = 0;
}

void Parking::park(ParkedRun run) {
    const u64 serial = ++serial_;
    blocks_ += run.names.size();
    bytes_ += bytes_of(run);
    awaited_.emplace(run.awaits, serial);
    for (std::size_t i = 0; i < run.names.size(); ++i) {
        if (run.waits[i]) names_.emplace(run.slot, run.names[i], serial, i), ++run.waiting;
    }
    runs_.emplace(serial, std::move(run));
}

std::size_t Parking::evict_one() {
    const bool full = blocks_ > kParkedBlocksMax || bytes_ > kParkedBytesMax;
    return full ? take(runs_.begin()).names.size() : 0;
}

std::optional<ParkedRun> Parking::release(u64 name) {
    const auto at = awaited_.lower_bound({name, 0});
    if (at == awaited_.end() || at->first != name) return std::nullopt;
    return take(runs_.find(at->second));
}

// Drop the oldest waiting copy of a name.
bool Parking::cancel(u32 slot, u64 name) {
    const auto found = names_.lower_bound({slot, name, 0, 0});
    if (found == names_.end() || std::get<0>(*found) != slot || std::get<1>(*found) != name) return false;
    const auto run = runs_.find(std::get<2>(*found));
    run->second.waits[std::get<3>(*found)] = false;
    names_.erase(found);
    if (--run->second.waiting == 0) take(run);
    return true;
}

void Parking::clear_tier(u32 tier) {
    std::vector<std::pair<u32, u64>> waiting;
    for (const auto& one : names_) {
        if (std::get<0>(one) % kTiers == tier) waiting.emplace_back(std::get<0>(one), std::get<1>(one));
    }
    for (const auto& [slot, name] : waiting) cancel(slot, name);
}

std::size_t Parking::expire_one(u64 batch) {
    if (runs_.empty() || batch - runs_.begin()->second.batch < kParkedBatchesMax) return 0;
    return take(runs_.begin()).names.size();
}

ParkedRun Parking::take(std::map<u64, ParkedRun>::iterator at) {
    const u64 serial = at->first;
    ParkedRun run = std::move(at->second);
    runs_.erase(at);
    blocks_ -= run.names.size();
    bytes_ -= bytes_of(run);
    awaited_.erase({run.awaits, serial});
    for (std::size_t i = 0; i < run.names.size(); ++i) {
        if (run.waits[i]) names_.erase({run.slot, run.names[i], serial, i});
    }
    return run;
}

std::size_t Parking::bytes_of(const ParkedRun& run) {
    return 300 + run.names.size() * 120 + run.tokens.size() * sizeof(u32) + run.extras.size() * sizeof(ExtraKey);
}

}  // namespace blockcast
