#include "book.hpp"

#include <cstring>

namespace blockcast {

namespace {

constexpr std::size_t kPromptBytes = 600;  // of a prompt, besides ids and outline
constexpr double kAlikeMin = 0.5;  // prompts without messages are one conversation's that share so much of the shorter one

bool begins(const Ids& ids, const Ids& past) {
    return past.size > 0 && past.size <= ids.size && ids.data[past.size - 1] == past.data[past.size - 1] &&
           std::memcmp(ids.data, past.data, past.size * sizeof(u32)) == 0;
}

// Whether a message, at its place, is the same in both: then `likeness` finds one.
bool have_common(const std::optional<Outline>& outline, const Past& past, bool named) {
    if (!outline || !past.outline) return false;
    const auto &own = outline->messages, &old = past.outline->messages;
    for (std::size_t at = 0; at < std::min(own.size(), old.size()); ++at) {
        if (own[at].bare == old[at].bare && (named || own[at].is_said()) && (past.session || old[at].is_said())) return true;
    }
    return false;
}

// `own`: the messages of the prompt that it may have come before. None where they have nothing in common.
std::optional<u64> likeness(const Past& past, const std::optional<std::vector<u32>>& own, std::size_t common, std::size_t tokens) {
    if (own && past.outline) {
        const std::vector<u32> old = contents(*past.outline, !past.session);
        u64 found = 0;
        for (const u32 one : old) found += std::binary_search(own->begin(), own->end(), one);
        return found ? std::optional<u64>(found) : std::nullopt;
    }
    const double least = kAlikeMin * static_cast<double>(std::min(past.ids.size, tokens));
    return past.session || static_cast<double>(common) >= least ? std::optional<u64>(common) : std::nullopt;
}

}  // namespace

std::size_t Ids::shared(const Ids& other) const {
    constexpr std::size_t kAtOnce = 256;
    const std::size_t most = std::min(size, other.size);
    std::size_t same = 0;
    while (same + kAtOnce <= most && std::memcmp(data + same, other.data + same, kAtOnce * sizeof(u32)) == 0) same += kAtOnce;
    while (same < most && data[same] == other.data[same]) ++same;
    return same;
}

std::vector<u64> marks(const std::vector<u64>& keys) {
    std::vector<u64> found;
    for (std::size_t count = keys.size(); count > 0; count /= 2) found.push_back(keys[count - 1]);
    std::reverse(found.begin(), found.end());
    return found;
}

// Those that begin alike, the longest common beginning first. With `all` also by what tells too little of prompts that merely
// begin alike.
Book::Pasts Book::by_keys(const Asked& asked, bool all) const {
    Pasts found;
    const auto look = [&](u64 key) {
        const auto known = keys_.find(key);
        if (known == keys_.end() || std::find(found.begin(), found.end(), known->second) != found.end()) return;
        if (found.size() < branches_max_) found.push_back(known->second);
    };
    if (all && asked.begins) look(*asked.begins);
    for (std::size_t i = asked.keys.size(); i-- > 0 && found.size() < branches_max_;) look(asked.keys[i]);
    for (std::size_t i = all ? asked.shorts.size() : 0; i-- > 0 && found.size() < branches_max_;) look(asked.shorts[i]);
    return found;
}

const Book::Pasts* Book::by_session(const Asked& asked, bool parents) const {
    auto found = sessions_.find(*asked.session);
    if (found == sessions_.end() && parents && asked.parent) found = sessions_.find(*asked.parent);
    return found == sessions_.end() ? nullptr : &found->second;
}

std::shared_ptr<Past> Book::goes_on(const Asked& asked) const {
    const auto first = [&](const Pasts& candidates) -> std::shared_ptr<Past> {
        for (const auto& past : candidates) {
            if (*past->scope == *asked.scope && begins(asked.ids, past->ids)) return past;
        }
        return nullptr;
    };
    if (!asked.session) return first(by_keys(asked, true));
    const Pasts* const branches = by_session(asked, false);
    return branches == nullptr ? nullptr : first(*branches);
}

Book::Before Book::before(const Asked& asked, const std::optional<Outline>& outline) const {
    Pasts alike;
    const Pasts* candidates = &alike;
    if (!asked.session) {
        alike = by_keys(asked, false);
    } else if (const Pasts* const branches = by_session(asked, true)) {
        candidates = branches;
    }
    const bool named = asked.session.has_value();
    if (candidates->size() == 1 && have_common(outline, *candidates->front(), named)) {  // as usual: it need not be counted
        return {candidates->front(), candidates->front()->ids.shared(asked.ids)};
    }
    std::optional<std::vector<u32>> own;
    if (outline && !candidates->empty()) own = contents(*outline, !named);
    Before found;
    u64 most = 0;
    for (const auto& past : *candidates) {
        const std::size_t common = past->ids.shared(asked.ids);
        const auto like = likeness(*past, own, common, asked.ids.size);
        if (like && (!found.past || std::pair(*like, common) > std::pair(most, found.common))) {
            most = *like;
            found = {past, common};
        }
    }
    return found;
}

void Book::put(const std::shared_ptr<Past>& past, const std::shared_ptr<Past>& instead) {
    if (instead && instead->session == past->session) drop(instead);
    past->bytes = kPromptBytes + sizeof(u32) * past->ids.size + (past->outline ? past->outline->bytes() : 0);
    if (past->bytes > bytes_max_) return;
    past->place = pasts_.insert(pasts_.end(), past);
    past->kept = true;
    used_bytes_ += past->bytes;
    shorts_ += past->is_short;
    for (const u64 key : past->keys) keys_[key] = past;
    if (past->session) {
        Pasts& branches = sessions_[*past->session];
        branches.insert(branches.begin(), past);
        if (branches.size() > branches_max_) drop(std::shared_ptr<Past>(branches.back()));
    }
    while (used_bytes_ > bytes_max_) drop(std::shared_ptr<Past>(pasts_.front()));
}

void Book::forget(const std::string& session) {
    const auto found = sessions_.find(session);
    if (found == sessions_.end()) return;
    const Pasts branches = found->second;
    for (const auto& past : branches) drop(past);
}

void Book::expire(double now) {
    while (!pasts_.empty() && now - pasts_.front()->at_s >= keep_s_) drop(std::shared_ptr<Past>(pasts_.front()));
}

std::size_t Book::outlined(const std::string& session) const {
    const auto found = sessions_.find(session);
    return found == sessions_.end() ? 0 : found->second.front()->messages();
}

void Book::drop(const std::shared_ptr<Past>& past) {
    if (!past->kept) return;
    past->kept = false;
    used_bytes_ -= past->bytes;
    shorts_ -= past->is_short;
    for (const u64 key : past->keys) {
        const auto found = keys_.find(key);
        if (found != keys_.end() && found->second == past) keys_.erase(found);
    }
    if (past->session) {
        const auto found = sessions_.find(*past->session);
        Pasts& branches = found->second;
        branches.erase(std::find(branches.begin(), branches.end(), past));
        if (branches.empty()) sessions_.erase(found);
    }
    const auto place = past->place;
    pasts_.erase(place);  // last: it may be what keeps the prompt
}

bool Book::holds_together() const {
    std::size_t bytes = 0, shorts = 0, named = 0;
    for (const auto& past : pasts_) {
        if (!past->kept) return false;
        bytes += past->bytes;
        shorts += past->is_short;
        if (!past->session) continue;
        const auto found = sessions_.find(*past->session);
        if (found == sessions_.end()) return false;
        if (std::count(found->second.begin(), found->second.end(), past) != 1) return false;
        ++named;
    }
    for (const auto& [name, branches] : sessions_) {
        if (branches.empty() || branches.size() > branches_max_ || name != *branches.front()->session) return false;
        named -= branches.size();
    }
    const auto known = [](const auto& entry) { return entry.second->kept; };
    return bytes == used_bytes_ && bytes <= bytes_max_ && shorts == shorts_ && named == 0 &&
           std::all_of(keys_.begin(), keys_.end(), known);
}

}  // namespace blockcast
