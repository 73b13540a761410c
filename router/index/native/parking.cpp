// The runs that wait for a name, oldest first.
#include <algorithm>

#include "holder.hpp"

namespace blockcast {

namespace {

template <class Map, class Key>
void discard(Map& map, const Key& key, u64 serial) {
    const auto found = map.find(key);
    if (found == map.end()) return;
    auto& serials = found->second;
    serials.erase(std::remove(serials.begin(), serials.end(), serial), serials.end());
    if (serials.empty()) map.erase(found);
}

}  // namespace

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
    awaited_[run.awaits].push_back(serial);
    for (std::size_t i = 0; i < run.names.size(); ++i) {
        if (!run.waits[i]) continue;
        auto& serials = names_[{run.slot, run.names[i]}];
        if (serials.empty() || serials.back() != serial) serials.push_back(serial);
    }
    runs_.emplace(serial, std::move(run));
    while (blocks_ > kParkedBlocksMax) take(runs_.begin()->first);
}

std::vector<ParkedRun> Parking::release(u64 name) {
    std::vector<ParkedRun> released;
    const auto found = awaited_.find(name);
    if (found == awaited_.end()) return released;
    const std::vector<u64> serials = found->second;
    for (u64 serial : serials) released.push_back(take(serial));
    return released;
}

bool Parking::cancel(u32 slot, u64 name) {
    const auto found = names_.find({slot, name});
    if (found == names_.end()) return false;
    const u64 serial = found->second.front();
    ParkedRun& run = runs_.at(serial);
    std::size_t first = run.names.size(), copies = 0;
    bool any = false;
    for (std::size_t i = 0; i < run.names.size(); ++i) {
        if (run.waits[i] && run.names[i] == name && ++copies == 1) first = i;
    }
    run.waits[first] = false;
    if (copies == 1) discard(names_, std::make_pair(slot, name), serial);
    for (bool waits : run.waits) any = any || waits;
    if (!any) take(serial);
    return true;
}

void Parking::expire(u64 batch) {
    while (!runs_.empty() && batch - runs_.begin()->second.batch >= kParkedBatchesMax) take(runs_.begin()->first);
}

ParkedRun Parking::take(u64 serial) {
    const auto found = runs_.find(serial);
    ParkedRun run = std::move(found->second);
    runs_.erase(found);
    blocks_ -= run.names.size();
    bytes_ -= bytes_of(run);
    discard(awaited_, run.awaits, serial);
    for (std::size_t i = 0; i < run.names.size(); ++i) {
        if (run.waits[i]) discard(names_, std::make_pair(run.slot, run.names[i]), serial);
    }
    return run;
}

std::size_t Parking::bytes_of(const ParkedRun& run) {
    return 300 + run.names.size() * 120 + run.tokens.size() * sizeof(u32) + run.extras.size() * sizeof(ExtraKey);
}

}  // namespace blockcast
