// Why a prompt was not cached: every token that had to be computed, and the reason. Owns the reasons. A prompt's tokens [0, L)
// are cut at the ends of nested beginnings: what the worker reused, what was predicted there, what the best worker had, what
// the fleet held once, what the conversation's last prompt and answer had. Invariant: the parts are what lies between what was
// reused and L, in order and without a gap.
#pragma once

#include <limits>

#include "book.hpp"

namespace blockcast {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

// Some of the tokens that had to be computed.
struct Part {
    Reason reason;
    i64 start, end;
    i64 position = -1;   // the first token that differs from what was there before
    i64 message = -1;    // of the body's messages, the one with that token
    Text worker;  // who had it
    double ago_s = kUnknown;  // when it lost it
    double here_s = kUnknown, there_s = kUnknown;  // time to the first token where the request went, and where more was cached
};

// Where it went, and what was predicted of it.
struct Placed {
    Text worker;
    i64 block = 1, cached = 0, resident = 0;  // tokens, of its blocks too
    double ttft_s = 0;
    i64 attempt = 0;
    bool has_better = false;  // a worker with more of it
    Text best_worker;
    i64 best_cached = 0;
    double best_ttft_s = 0;
};

// One request, and the prompt that it left in the book.
struct Why {
    Text id;
    double at;  // wall clock
    Name session;
    Placed placed;
    i64 prompt, sampled;
    std::optional<i64> reported;  // as the worker says, where it does
    Vector<Part> parts;
    std::weak_ptr<Past> past;  // until its end; what the book forgets is gone
    bool final;

    // That of most of the lost tokens; where none was lost, of the new ones.
    struct Sum {
        Reason reason = Reason::kNewText;
        i64 position = -1;  // where the prompt leaves what is or was held, for that reason
        i64 lost = 0;
    };
    Sum sum() const;
    // The worker said how much it reused: what was predicted beyond that is missing too, what it had beyond is not.
    void settle(i64 reused);
};

// What is asked only where something is missing.
class Facts {
public:
    virtual ~Facts() = default;
    struct Gone {
        i64 end;
        Text worker;
        double at_s;
    };
    // What of the prompt behind this position was held and removed, in blocks of so many tokens.
    virtual std::optional<Gone> gone(i64 start, i64 step) = 0;
    // When a worker last lost all it held.
    virtual std::optional<double> emptied(const Text& worker) = 0;
    // Whether a worker's cache is guessed: it tells nothing of what it removes.
    virtual bool guessed(const Text& worker) = 0;
    // Whether what these ids say opens or closes a thought.
    virtual bool thinks(const Vector<u32>& ids) = 0;
    // The outline of the messages from that one on, or of all where those are known; none where it is no chat, or that part
    // is not known.
    struct Drawn {
        Outline outline;
        bool is_whole = true;
    };
    virtual std::optional<Drawn> outline(std::size_t after) = 0;
    std::optional<Outline> outline() {
        auto drawn = outline(0);
        return drawn ? std::optional<Outline>(std::move(drawn->outline)) : std::nullopt;
    }
};

// A prompt beside the one it goes on from.
struct Turn {
    std::shared_ptr<Past> past;
    std::size_t common = 0;
    std::optional<Outline> outline;  // whole, where the two part before the past one's end
    bool same_session = true;        // false: the past prompt is the parent's
    std::optional<Reason> differs;   // what of the scope does
};

Turn turn_of(const Book& book, const Asked& asked, Facts& facts);
// [what was predicted to be cached, the prompt's length), part by part.
Vector<Part> parts_of(const Asked& asked, const Turn& turn, const Placed& placed, Facts& facts, double now);

// Whether it had to be computed, whoever it was sent to.
inline bool is_no_loss(Reason reason) { return reason <= Reason::kBlockRest; }

}  // namespace blockcast
