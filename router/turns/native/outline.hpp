// A conversation as digests (router/prompting/outline.py makes them), and how one differs from another. No text. Owns the
// names of what changed. Refuses to know tokens and caches.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "pool.hpp"

namespace blockcast {

using i64 = std::int64_t;
using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

// Why some tokens had to be computed; router/turns/why.py says whose doing each is.
enum class Reason : u8 {
    kNewSession, kNewText, kBlockRest, kBillingLine, kSystemPrompt, kTools, kTemplateFlag, kThinkingDropped, kToolArguments,
    kTruncated, kEdited, kReEncoded, kSalt, kLora, kModel, kEvicted, kWorkerLost, kElsewhere, kNotAnnounced, kMispredicted,
};
constexpr std::array<const char*, 20> kReasons = {
    "new_session", "new_text", "block_rest", "billing_line", "system_prompt", "tools", "template_flag", "thinking_dropped",
    "tool_arguments", "truncated", "edited", "re_encoded", "salt", "lora", "model", "evicted", "worker_lost", "elsewhere",
    "not_announced", "mispredicted",
};

// One message, as outline.py's WORDS has it.
struct Message {
    u32 sent, normalised, bare, kind, size;

    static constexpr u32 kRole = 7, kThinks = 8, kBilled = 16, kCalls = 32;
    u32 role() const { return kind & kRole; }
    bool is_said() const { return role() != 0; }  // no system prompt
};
static_assert(sizeof(Message) == 5 * sizeof(u32));

// The first `kept` ones of `base`, which somebody else made and keeps, then `own`.
class Messages {
public:
    std::shared_ptr<const void> owner;  // of the base
    const Message* base = nullptr;
    std::size_t kept = 0;
    Vector<Message> own;

    std::size_t size() const { return kept + own.size(); }
    const Message& operator[](std::size_t at) const { return at < kept ? base[at] : own[at - kept]; }
    // How many of the first ones need not be looked at to know that they are the same.
    std::size_t shared(const Messages& other) const { return base == other.base ? std::min(kept, other.kept) : 0; }
};

struct Outline {
    Messages messages;
    Vector<u32> tools;
    u32 flags = 0;

    std::size_t bytes() const { return messages.size() * sizeof(Message) + tools.size() * sizeof(u32) + 256; }
};

// Its messages, in whatever place, ascending, each once: conversations that have nothing to do with each other have none in
// common. With `said` without system prompts, which many conversations share.
inline Vector<u32> contents(const Outline& outline, bool said) {
    Vector<u32> found;
    for (std::size_t i = 0; i < outline.messages.size(); ++i) {
        const Message& message = outline.messages[i];
        if (!said || message.is_said()) found.push_back(message.bare);
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

// How the answer that stands at `message` may have been rendered otherwise than it was generated; none where none stands
// there.
inline std::optional<Reason> answered(const Outline& outline, std::size_t message) {
    constexpr u32 kAssistant = 2;
    if (message >= outline.messages.size() || outline.messages[message].role() != kAssistant) return std::nullopt;
    const u32 kind = outline.messages[message].kind;
    if (kind & Message::kThinks) return Reason::kThinkingDropped;
    return kind & Message::kCalls ? Reason::kToolArguments : Reason::kReEncoded;
}

struct Difference {
    Reason how;
    i64 message = -1;  // none
};

namespace differing {

// Of the messages that changed, the one where the tokens part, after `share` of the old ones: what a template drops anyway
// changes nothing.
inline std::size_t parting(const Outline& old, const Vector<std::size_t>& changed, double share) {
    constexpr double kTail = 0.1;  // a message may begin so much of the prompt earlier or later than its characters say
    if (changed.size() == 1) return changed.front();
    u64 all = 0, before = 0;
    for (std::size_t i = 0; i < old.messages.size(); ++i) all += old.messages[i].size;
    std::size_t at = 0;
    for (const std::size_t candidate : changed) {
        while (at <= candidate) before += old.messages[at++].size;
        if (static_cast<double>(before) >= (share - kTail) * static_cast<double>(all)) return candidate;
    }
    return changed.back();
}

inline Reason of_message(const Outline& old, const Outline& now, std::size_t at) {
    const Message &was = old.messages[at], &is = now.messages[at];
    bool is_later = false;
    for (std::size_t i = at + 1; i < old.messages.size(); ++i) is_later = is_later || old.messages[i].sent == is.sent;
    if (is_later || now.messages.size() < old.messages.size()) return Reason::kTruncated;
    const u32 kind = was.kind | is.kind;
    if (kind & Message::kBilled && was.bare == is.bare) return Reason::kBillingLine;
    if (was.normalised == is.normalised) return Reason::kToolArguments;
    if (kind & Message::kThinks && was.bare == is.bare) return Reason::kThinkingDropped;
    return is.role() == 0 ? Reason::kSystemPrompt : Reason::kEdited;
}

}  // namespace differing

// How `now` is another prompt than `old`, where their tokens part after this share of the old one's. Both are whole. Where no
// message, tool or flag tells, the template rendered the same otherwise: it dropped a thought, or another encoding was chosen.
inline Difference difference(const Outline& old, const Outline& now, double share) {
    constexpr u32 kUser = 1;
    if (old.tools != now.tools) return {Reason::kTools};
    Vector<std::size_t> changed;
    const std::size_t count = std::min(old.messages.size(), now.messages.size());
    for (std::size_t i = old.messages.shared(now.messages); i < count; ++i) {
        if (old.messages[i].sent != now.messages[i].sent) changed.push_back(i);
    }
    if (!changed.empty()) {
        const std::size_t first = differing::parting(old, changed, share);
        return {differing::of_message(old, now, first), static_cast<i64>(first)};
    }
    if (now.messages.size() < old.messages.size()) return {Reason::kTruncated, static_cast<i64>(count)};
    if (old.flags != now.flags) return {Reason::kTemplateFlag};
    std::size_t thought = old.messages.size();  // the first behind what a user asked last
    for (std::size_t i = old.messages.size(); i-- > 0 && old.messages[i].role() != kUser;) {
        if (old.messages[i].kind & Message::kThinks) thought = i;
    }
    if (thought == old.messages.size()) return {Reason::kReEncoded};
    return {Reason::kThinkingDropped, static_cast<i64>(thought)};
}

}  // namespace blockcast
