// What became of the last requests. Owns the sums by reason.
#pragma once

#include <deque>

#include "python.hpp"

namespace blockcast {

// The book, the last answers to "why" and the sums by reason.
class Ledger {
public:
    Ledger(std::size_t bytes_max, double keep_s, std::size_t branches_max, std::size_t whys_max, nb::dict turns,
           nb::dict tokens, nb::dict sums)
        : book(bytes_max, keep_s, branches_max), whys_max_(whys_max), counters_{std::move(turns), std::move(tokens), std::move(sums)} {}

    std::shared_ptr<Why> explained(const Asked& asked, const Placed& placed, Facts& facts, double now, double at) const {
        return why(asked, turn_of(book, asked, facts), placed, facts, now, at);
    }

    std::shared_ptr<Why> begun(const Asked& asked, const Placed& placed, Facts& facts, double now, double at) {
        book.expire(now);
        Turn turn = turn_of(book, asked, facts);
        auto made = why(asked, turn, placed, facts, now, at);
        Vector<u64> keys;
        if (!asked.session) {
            keys = marks(asked.keys);
            if (keys.empty() && !asked.shorts.empty()) keys.push_back(asked.shorts.back());
            if (asked.begins) keys.push_back(*asked.begins);
        }
        const bool is_short = !asked.session && asked.keys.empty();
        const auto kept = make<Past>();
        made->past = kept;
        Past& past = *kept;
        past.scope = asked.scope;
        past.ids = asked.ids.lasting();
        past.outline = std::move(turn.outline);
        past.worker = placed.worker;
        past.at_s = now;
        past.session = asked.session;
        past.keys = std::move(keys);
        past.is_short = is_short;
        if (static_cast<i64>(asked.ids.size()) >= placed.block) book.put(kept, turn.past);  // of less nothing can be cached
        remember(made);
        return made;
    }

    void ended(Why& why, i64 reported, i64 answer, double now) {
        if (const auto past = why.past.lock()) {
            past->answer = answer;
            past->at_s = now;
        }
        why.past.reset();
        if (reported >= 0) why.settle(reported);
        ++turns_[place(why.sum().reason)];
        for (const Part& part : why.parts) tokens_[place(part.reason)] += part.end - part.start;
        if (why.reported) {
            const Placed& placed = why.placed;
            const i64 best = placed.has_better ? placed.best_cached : placed.cached;
            const i64 found[] = {why.prompt, best, placed.cached, *why.reported};
            for (std::size_t i = 0; i < kSums.size(); ++i) sums_[i] += found[i];
        }
        if (why.final && why.session) book.forget(*why.session);
    }

    // Adds to the counters what was counted since the last time.
    void tell() {
        move(turns_, kReasons, counters_[0]);
        move(tokens_, kReasons, counters_[1]);
        move(sums_, kSums, counters_[2], sums_[0] > 0);
    }

    std::shared_ptr<Why> get(const Text& id) const {
        const std::size_t digest = TextHash()(id);  // nobody asks often, and a table would be asked with every request
        for (auto one = whys_.rbegin(); one != whys_.rend(); ++one) {
            if (one->digest == digest && one->why->id == id) return one->why;
        }
        return nullptr;
    }
    std::size_t size() const { return whys_.size(); }

    Book book;

private:
    static std::size_t place(Reason reason) { return static_cast<std::size_t>(reason); }

    static std::shared_ptr<Why> why(const Asked& asked, const Turn& turn, const Placed& placed, Facts& facts, double now, double at) {
        auto made = make<Why>();
        made->id = asked.id;
        made->at = at;
        made->session = asked.session;
        made->placed = placed;
        made->prompt = static_cast<i64>(asked.ids.size());
        made->sampled = asked.sampled;
        made->final = asked.final;
        made->parts = parts_of(asked, turn, placed, facts, now);
        return made;
    }

    void remember(const std::shared_ptr<Why>& why) {
        whys_.push_back({TextHash()(why->id), why});
        if (whys_.size() > whys_max_) whys_.pop_front();
    }

    struct Last {
        std::size_t digest;  // of its id
        std::shared_ptr<Why> why;
    };

    std::size_t whys_max_;
    nb::dict counters_[3];
    std::array<i64, kReasons.size()> turns_{}, tokens_{};
    std::array<i64, kSums.size()> sums_{};
    std::deque<Last, Pooled<Last>> whys_;  // the oldest first
};

}  // namespace blockcast
