#include "book.hpp"

#include <cstring>

namespace blockcast {

namespace {

constexpr std::size_t kPromptBytes = 600;  // of a prompt, besides ids and outline
constexpr double kAlikeMin = 0.5;  // prompts without messages are one conversation's that share so much of the shorter one

bool begins(const Ids& ids, const Ids& past) {
    const std::size_t size = past.size();
    return size > 0 && size <= ids.size() && *ids.from(size - 1).first == past.last() && past.shared(ids) == size;
}

// How many of the first ones are the same.
std::size_t same_first(const u32* one, const u32* other, std::size_t most) {
    constexpr std::size_t kAtOnce = 256;
    std::size_t same = 0;
    while (same + kAtOnce <= most && std::memcmp(one + same, other + same, kAtOnce * sizeof(u32)) == 0) same += kAtOnce;
    while (same < most && one[same] == other[same]) ++same;
    return same;
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
std::optional<u64> likeness(const Past& past, const std::optional<Vector<u32>>& own, std::size_t common, std::size_t tokens) {
    if (own && past.outline) {
        const Vector<u32> old = contents(*past.outline, !past.session);
        u64 found = 0;
        for (const u32 one : old) found += std::binary_search(own->begin(), own->end(), one);
        return found ? std::optional<u64>(found) : std::nullopt;
    }
    const double least = kAlikeMin * static_cast<double>(std::min(past.ids.size(), tokens));
    return past.session || static_cast<double>(common) >= least ? std::optional<u64>(common) : std::nullopt;
}

}  // namespace

std::size_t Ids::shared(const Ids& other) const {
    const std::size_t most = std::min(size(), other.size());
    std::size_t same = base->data == other.base->data ? std::min(kept, other.kept) : 0;
    while (same < most) {
        const auto [one, ones] = from(same);
        const auto [two, twos] = other.from(same);
        const std::size_t run = std::min({ones, twos, most - same}), found = same_first(one, two, run);
        same += found;
        if (found < run) break;
    }
    return same;
}

Vector<u64> marks(const Vector<u64>& keys) {
    Vector<u64> found;
    for (std::size_t count = keys.size(); count > 0; count /= 2) found.push_back(keys[count - 1]);
    std::reverse(found.begin(), found.end());
    return found;
}

Book::Pasts Book::alike(const Asked& asked) const {
    Pasts found;
    if (asked.session || keys_.empty()) return found;
    for (std::size_t i = asked.keys.size(); i-- > 0 && found.size() < branches_max_;) add(found, asked.keys[i]);
    return found;
}

void Book::add(Pasts& found, u64 key) const {
    const auto known = keys_.find(key);
    if (known == keys_.end() || found.size() >= branches_max_) return;
    if (std::find(found.begin(), found.end(), known->second) == found.end()) found.push_back(known->second);
}

const Book::Pasts* Book::by_session(const Asked& asked, bool parents) const {
    auto found = sessions_.find(*asked.session);
    if (found == sessions_.end() && parents && asked.parent) found = sessions_.find(*asked.parent);
    return found == sessions_.end() ? nullptr : &found->second;
}

std::shared_ptr<Past> Book::goes_on(const Asked& asked, std::optional<Pasts>& alike) const {
    const auto is_it = [&](const std::shared_ptr<Past>& past) {
        return *past->scope == *asked.scope && begins(asked.ids, past->ids);
    };
    const auto first = [&](const Pasts& among) {
        const auto found = std::find_if(among.begin(), among.end(), is_it);
        return found == among.end() ? nullptr : *found;
    };
    if (asked.session) {
        alike.emplace();
        const Pasts* const branches = by_session(asked, false);
        return branches == nullptr ? nullptr : first(*branches);
    }
    Pasts candidates;  // also by what tells too little of prompts that merely begin alike
    if (asked.begins) add(candidates, *asked.begins);
    if (const auto found = first(candidates)) return found;
    alike = this->alike(asked);
    for (const auto& past : *alike) {
        const bool is_new = std::find(candidates.begin(), candidates.end(), past) == candidates.end();
        if (is_new && candidates.size() < branches_max_) candidates.push_back(past);
    }
    for (std::size_t i = asked.shorts.size(); i-- > 0;) add(candidates, asked.shorts[i]);
    return first(candidates);
}

Book::Before Book::before(const Asked& asked, const Pasts& alike, const std::optional<Outline>& outline) const {
    static const Pasts kNone;
    const Pasts* candidates = &alike;
    if (asked.session) {
        const Pasts* const branches = by_session(asked, true);
        candidates = branches == nullptr ? &kNone : branches;
    }
    const bool named = asked.session.has_value();
    if (candidates->size() == 1 && have_common(outline, *candidates->front(), named)) {  // as usual: it need not be counted
        return {candidates->front(), candidates->front()->ids.shared(asked.ids)};
    }
    std::optional<Vector<u32>> own;
    if (outline && !candidates->empty()) own = contents(*outline, !named);
    Before found;
    u64 most = 0;
    for (const auto& past : *candidates) {
        const std::size_t common = past->ids.shared(asked.ids);
        const auto like = likeness(*past, own, common, asked.ids.size());
        if (like && (!found.past || std::pair(*like, common) > std::pair(most, found.common))) {
            most = *like;
            found = {past, common};
        }
    }
    return found;
}

void Book::put(const std::shared_ptr<Past>& past, const std::shared_ptr<Past>& instead) {
    if (instead && instead->session == past->session) drop(instead);
    const Lent& lent = *past->ids.base;
    past->bytes = kPromptBytes + sizeof(u32) * past->ids.rest() + (past->outline ? past->outline->bytes() : 0);
    if (past->bytes + sizeof(u32) * lent.size > bytes_max_) return;
    past->place = pasts_.insert(pasts_.end(), past);
    past->kept = true;
    used_bytes_ += past->bytes;
    Base& base = bases_[lent.data];
    if (base.pasts++ == 0) used_bytes_ += base.bytes = sizeof(u32) * lent.size;
    shorts_ += past->is_short;
    for (const u64 key : past->keys) keys_[key] = past;
    if (past->session) {
        Pasts& branches = sessions_[*past->session];
        branches.insert(branches.begin(), past);
        if (branches.size() > branches_max_) drop(std::shared_ptr<Past>(branches.back()));
    }
    while (used_bytes_ > bytes_max_) drop(std::shared_ptr<Past>(pasts_.front()));
}

void Book::forget(const Text& session) {
    const auto found = sessions_.find(session);
    if (found == sessions_.end()) return;
    const Pasts branches = found->second;
    for (const auto& past : branches) drop(past);
}

void Book::expire(double now) {
    while (!pasts_.empty() && now - pasts_.front()->at_s >= keep_s_) drop(std::shared_ptr<Past>(pasts_.front()));
}

std::size_t Book::outlined(const Text& session) const {
    const auto found = sessions_.find(session);
    return found == sessions_.end() ? 0 : found->second.front()->messages();
}

void Book::drop(const std::shared_ptr<Past>& past) {
    if (!past->kept) return;
    past->kept = false;
    used_bytes_ -= past->bytes;
    const auto base = bases_.find(past->ids.base->data);
    if (--base->second.pasts == 0) {
        used_bytes_ -= base->second.bytes;
        bases_.erase(base);
    }
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
    std::size_t shared = 0;
    for (const auto& [data, base] : bases_) {
        shared += base.pasts;
        bytes += base.bytes;
    }
    if (shared != pasts_.size()) return false;
    const auto known = [](const auto& entry) { return entry.second->kept; };
    return bytes == used_bytes_ && bytes <= bytes_max_ && shorts == shorts_ && named == 0 &&
           std::all_of(keys_.begin(), keys_.end(), known);
}

}  // namespace blockcast
