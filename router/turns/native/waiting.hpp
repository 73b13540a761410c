// First bytes and ends that wait to be looked at, with others: what runs once a request is in no processor's cache, which costs
// thrice as much as the work itself. Invariant: they are looked at in their order, each once.
#pragma once

#include "ledger.hpp"

namespace blockcast {

// A request whose conversation is looked at, from when it was priced until what its end told was added up. Nothing is kept that
// holds its body, its text, or those of its ids that are kept elsewhere.
struct Looked : std::enable_shared_from_this<Looked> {
    std::optional<Asked> asked;  // until its first byte was looked at
    nb::object told;             // the same, as it was told
    nb::object outline;
    nb::object body;             // what its body is read with once more, where that may be wanted; or ()
    Placed placed;
    double first_s = 0, end_s = 0;
    i64 reported = -1, answer = 0;
    bool has_begun = false;      // its first byte waits, or waited
    bool is_looked_at = false;   // that was, or is, elsewhere
    bool has_ended = false;      // its end came before that
    bool is_whole = false, is_sampled = false;  // its answer is; its reasons are logged
    std::shared_ptr<Why> why;    // what came of its first byte
};

// Whom to ask and to tell while they are looked at.
struct Askers {
    nb::handle facts;      // router/edge/reasons.py's IndexFacts
    double wall_s;         // what the clock on the wall is ahead
    nb::handle elsewhere;  // (looked, body): its conversation was changed, and its body is to be outlined as a whole
    nb::handle log;        // (why)
};

class Waiting {
public:
    // So many, of prompts with so many tokens, are looked at without waiting.
    Waiting(Ledger& ledger, std::size_t most, std::size_t most_tokens)
        : ledger_(ledger), most_(most), most_tokens_(most_tokens) {}

    static std::shared_ptr<Looked> entered(nb::handle asked, nb::handle outline, nb::handle body) {
        auto one = make<Looked>();
        one->asked = asked_of(asked);
        one->told = nb::borrow(asked);
        one->outline = nb::borrow(outline);
        one->body = nb::borrow(body);
        return one;
    }

    // Whether it is time to look at them; here and below.
    bool first(Looked& one, nb::handle placed, double now) {
        if (one.has_begun) return false;
        one.placed = placed_of(placed);
        one.first_s = now;
        one.has_begun = true;
        if (!one.asked->ids.whole) tokens_ += one.asked->ids.rest();
        return add(one.shared_from_this());
    }

    bool end(Looked& one, i64 reported, i64 answer, double now, bool is_whole, bool is_sampled) {
        if (!one.has_begun) return false;
        one.reported = reported;
        one.answer = answer;
        one.end_s = now;
        one.is_whole = is_whole;
        one.is_sampled = is_sampled;
        return add(one.shared_from_this());
    }

    // `failed`: (exception) of one of them; it ends that one's reasons, and nothing else.
    void settle(const Askers& askers, nb::handle failed) {
        const Vector<std::shared_ptr<Looked>> waiting = std::exchange(waiting_, {});
        tokens_ = 0;
        for (const auto& one : waiting) {
            try {
                if (!one->is_looked_at) {
                    begin(one, askers);
                } else if (one->why) {
                    finish(*one, askers);
                } else {
                    one->has_ended = true;  // its first byte failed, or is looked at elsewhere
                }
            } catch (nb::python_error& error) {
                if (!error.matches(PyExc_Exception)) throw;
                failed(error.value());
            } catch (const std::exception& error) {
                failed(nb::handle(PyExc_RuntimeError)(error.what()));
            }
        }
        ledger_.tell();
    }

    // With the outline that was made elsewhere.
    void begun(Looked& one, nb::handle outline, const Askers& askers) {
        know(one, outline, askers);
        if (one.has_ended) finish(one, askers);
        ledger_.tell();
    }

    std::size_t size() const { return waiting_.size(); }
    std::size_t tokens() const { return tokens_; }  // that they alone keep

private:
    bool add(std::shared_ptr<Looked> one) {
        waiting_.push_back(std::move(one));
        return waiting_.size() >= most_ || tokens_ >= most_tokens_;
    }

    void begin(const std::shared_ptr<Looked>& one, const Askers& askers) {
        one->is_looked_at = true;
        Asked& asked = *one->asked;
        if (!asked.session && (asked.keys.empty() || ledger_.book.shorts() > 0)) {
            asked.shorts = keys_of(askers.facts.attr("shorts")(one->told));
        }
        const nb::object outline = std::move(one->outline), body = std::move(one->body);
        std::optional<Book::Pasts> alike;
        if (nb::len(body) > 0 && ledger_.book.goes_on(asked, alike) == nullptr) {
            askers.elsewhere(one, body);
        } else {
            know(*one, outline, askers);
        }
    }

    void know(Looked& one, nb::handle outline, const Askers& askers) {
        const nb::object told = std::move(one.told);
        const std::optional<Asked> asked = std::exchange(one.asked, std::nullopt);
        Told facts(askers.facts, outline, told);
        one.why = ledger_.begun(*asked, one.placed, facts, one.first_s, one.first_s + askers.wall_s);
    }

    void finish(Looked& one, const Askers& askers) {
        if (!one.is_whole) return;
        ledger_.ended(*one.why, one.reported, one.answer, one.end_s);
        if (one.is_sampled) askers.log(one.why);
    }

    Ledger& ledger_;
    std::size_t most_, most_tokens_, tokens_ = 0;
    Vector<std::shared_ptr<Looked>> waiting_;
};

}  // namespace blockcast
