#include "why.hpp"

#include <cmath>

namespace blockcast {

namespace {

constexpr std::size_t kTailTokens = 16;  // a prompt's end, with which the template asks for an answer
constexpr double kAnnouncedWithinS = 5.0;  // what was computed longer ago and was never announced will not be

i64 whole(i64 tokens, i64 block) { return tokens - tokens % block; }

std::optional<Reason> differing_scope(const Scope& old, const Scope& now) {
    if (old.model != now.model) return Reason::kModel;
    if (old.lora != now.lora) return Reason::kLora;
    return old.salt != now.salt ? std::optional<Reason>(Reason::kSalt) : std::nullopt;
}

// Of a prompt of so many tokens, from `at` on, one behind the other.
class Parts {
public:
    Parts(i64 at, i64 length) : at(at), length_(length) {}

    // What is left up to `end`, if anything is.
    Part* add(Reason reason, i64 end) {
        end = std::min(end, length_);
        if (end <= at) return nullptr;
        found.push_back(Part{reason, at, end, -1, -1, {}, kUnknown, kUnknown, kUnknown});
        at = end;
        return &found.back();
    }

    i64 at;
    Vector<Part> found;

private:
    i64 length_;
};

struct Lost {
    Reason reason;
    double ago_s;
};

// Why nobody has what the past prompt's worker computed, and how long ago it lost it.
Lost lost(const Past& past, Facts& facts, double now) {
    const std::optional<double> emptied_s = facts.emptied(past.worker);
    if (emptied_s && *emptied_s >= past.at_s) return {Reason::kWorkerLost, now - *emptied_s};
    if (facts.guessed(past.worker) || now - past.at_s > kAnnouncedWithinS) return {Reason::kEvicted, kUnknown};
    return {Reason::kNotAnnounced, kUnknown};
}

// How the prompt differs from the past one, in which message.
Difference difference_of(const Turn& turn, Facts& facts) {
    const Past& past = *turn.past;
    if (!turn.outline || !past.outline) return {Reason::kEdited};
    const double share = static_cast<double>(turn.common) / static_cast<double>(past.ids.size());
    const Difference found = difference(*past.outline, *turn.outline, share);
    const std::size_t tail = past.ids.size() - turn.common;
    if (found.how == Reason::kReEncoded && tail <= kTailTokens && answered(*turn.outline, past.messages())) {
        // What the template put before the answer is not what stands before it now.
        Vector<u32> ids;
        for (std::size_t at = turn.common; at < past.ids.size(); ++at) ids.push_back(*past.ids.from(at).first);
        const bool thinks = facts.thinks(ids);
        return {thinks ? Reason::kThinkingDropped : found.how, static_cast<i64>(past.messages())};
    }
    return found;
}

}  // namespace

Turn turn_of(const Book& book, const Asked& asked, Facts& facts) {
    Turn turn;
    std::optional<Book::Pasts> alike;
    turn.past = book.goes_on(asked, alike);
    if (turn.past != nullptr) {
        turn.common = turn.past->ids.size();
        std::optional<Facts::Drawn> drawn;
        if (turn.past->outline) drawn = facts.outline(turn.past->messages());
        if (!drawn) {
            turn.outline = facts.outline();
        } else if (drawn->is_whole) {
            turn.outline = std::move(drawn->outline);
        } else {
            const Outline& fresh = drawn->outline;
            turn.outline = *turn.past->outline;
            turn.outline->flags = fresh.flags;
            Vector<Message>& own = turn.outline->messages.own;
            for (std::size_t i = 0; i < fresh.messages.size(); ++i) own.push_back(fresh.messages[i]);
        }
        return turn;
    }
    turn.outline = facts.outline();
    Book::Before found = book.before(asked, *alike, turn.outline);
    if (found.past != nullptr) {
        turn.past = std::move(found.past);
        turn.common = found.common;
        turn.same_session = turn.past->session == asked.session;
        turn.differs = differing_scope(*turn.past->scope, *asked.scope);
    }
    return turn;
}

Vector<Part> parts_of(const Asked& asked, const Turn& turn, const Placed& placed, Facts& facts, double now) {
    const Past* const past = turn.past.get();
    const i64 block = placed.block, length = static_cast<i64>(asked.ids.size()), common = static_cast<i64>(turn.common);
    Parts parts(std::min(placed.cached, length), length);
    if (placed.has_better) {
        if (Part* const part = parts.add(Reason::kElsewhere, placed.best_cached)) {
            part->worker = placed.best_worker;
            part->here_s = placed.ttft_s;
            part->there_s = placed.best_ttft_s;
        }
    }
    const bool goes_on = past != nullptr && turn.common == past->ids.size();
    const i64 known = past == nullptr ? 0 : goes_on ? past->known() : common;
    const i64 usable = whole(std::min(known, length - 1), block);
    if (past == nullptr || turn.differs || parts.at < usable) {
        if (const auto gone = facts.gone(parts.at, block)) {
            if (Part* const part = parts.add(Reason::kEvicted, gone->end)) {
                part->worker = gone->worker;
                part->ago_s = now - gone->at_s;
            }
        }
    }
    if (past == nullptr) {
        parts.add(Reason::kNewSession, length);
        return parts.found;
    }
    if (turn.differs) {
        parts.add(*turn.differs, whole(common, block));
        parts.add(Reason::kBlockRest, common);
    } else if (parts.at < whole(std::min(common, length - 1), block)) {
        const Lost why = lost(*past, facts, now);
        if (Part* const part = parts.add(why.reason, usable)) {
            part->worker = past->worker;
            part->ago_s = why.ago_s;
        }
    }
    if (!goes_on && turn.same_session && !turn.differs) {
        const Difference how = difference_of(turn, facts);
        if (Part* const part = parts.add(how.how, past->known())) {
            part->position = common;
            part->message = how.message;
        }
    } else if (goes_on && parts.at < usable && turn.outline) {
        if (const auto answer = answered(*turn.outline, past->messages())) {
            const i64 position = std::max(parts.at, common);
            if (Part* const part = parts.add(*answer, known)) {
                part->position = position;
                part->message = static_cast<i64>(past->messages());
            }
        }
    } else {
        parts.add(Reason::kBlockRest, known);
    }
    parts.add(turn.same_session ? Reason::kNewText : Reason::kNewSession, length);
    return parts.found;
}

Why::Sum Why::sum() const {
    Sum sum;
    const Part *main = nullptr, *fresh = nullptr;
    for (const Part& part : parts) {
        const i64 tokens = part.end - part.start;
        const Part*& most = is_no_loss(part.reason) ? fresh : main;
        if (!is_no_loss(part.reason)) sum.lost += tokens;
        if (most == nullptr || tokens > most->end - most->start) most = &part;
    }
    if (main == nullptr) main = fresh;
    if (main == nullptr) return sum;
    sum.reason = main->reason;
    sum.position = main->position < 0 ? main->start : main->position;
    return sum;
}

void Why::settle(i64 reused) {
    reported = reused;
    reused = std::min(reused, prompt);
    const i64 vouched = std::min(std::max(placed.resident, reused), placed.cached);
    Vector<Part> kept;
    const auto missing = [&](Reason reason, i64 start, i64 end) {
        if (end > start) kept.push_back(Part{reason, start, end, -1, -1, placed.worker, kUnknown, kUnknown, kUnknown});
    };
    missing(Reason::kMispredicted, reused, vouched);
    missing(Reason::kNotAnnounced, vouched, placed.cached);
    for (Part& part : parts) {
        if (part.end <= reused) continue;
        part.start = std::max(part.start, reused);
        kept.push_back(std::move(part));
    }
    parts = std::move(kept);
}

}  // namespace blockcast
