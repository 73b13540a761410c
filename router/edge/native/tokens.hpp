// The token ids of one streamed answer: noted as they pass, and taken out where only the router asked for them.
//
// Owns what must be known to let another worker go on when this one dies. Passes on whole SSE events only, so that what
// the client has seen is what was noted. Refuses to know HTTP (relay.hpp follows the chunks) and JSON beyond the few
// keys below: a quotation mark inside a JSON string is escaped, so no generated text can look like one of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace blockcast {

// An event that has not ended by then is passed on as it comes, and nothing is noted any more.
constexpr std::size_t kEventBytesMax = 4 << 20;
// Ids noted of a prompt, and of an answer; nobody goes on with a longer one.
constexpr std::size_t kIdsMax = 2 << 20;

class Tokens {
public:
    // `hide`: token ids are taken out of what is passed on.
    explicit Tokens(bool hide) : hide_(hide) {}

    // The next bytes of the body's content; whole events are appended to `out`.
    void feed(std::string_view content, std::string& out);

    // An event that says that the worker failed, and what follows it: kept back until this is called.
    std::string release();

    // Another worker goes on. What is of an event that never ended is forgotten, and, where `exact`, so are tokens whose
    // text has not all come.
    void rewind(bool exact);

    std::vector<std::uint32_t> prompt;
    std::vector<std::uint32_t> answer;
    std::size_t spoken = 0;    // tokens of `answer` when text last came with them
    std::string last;          // the last event with a choice, as it was passed on
    std::uint64_t events = 0;  // events passed on
    bool odd = false;          // what is neither text, thought nor call was told, or text without its ids
    bool parsed = false;       // a thought or a tool's call was told
    bool finished = false;     // a finish reason has come
    bool failed = false;       // an event says that the worker failed

private:
    void event(std::string_view text, std::string& out);
    bool take_ids(std::string_view text, std::string& kept);

    bool hide_;
    bool passes_ = false;
    std::string pending_;       // of an event that has not ended
    std::size_t searched_ = 0;  // no end of an event begins before it
};

}  // namespace blockcast
