// Streams relayed from workers to clients without Python: read, follow the chunk sizes, write.
//
// Owns duplicates of both sockets of each stream, so that a number that the event loop has closed and given away again
// can never be written to. Refuses everything that is not an ordinary middle of a chunked body: what it read then goes
// back as it came, with where the body stood before it, and the caller's own reader (router/http/response.py) goes on.
// router/edge/relay.py is its Python half.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tokens.hpp"

namespace blockcast {

// Where a chunked body stands: content bytes of the current chunk to come, or between two chunks.
constexpr std::int64_t kBetweenChunks = -1;

// Follow `left` over `size` bytes. False, and `left` unchanged, where they hold more than whole lines of ordinary
// chunks: the last chunk, an extension, a line that goes on in the next read, an error. `content` gets what they carry.
bool follow_chunks(const char* data, std::size_t size, std::int64_t& left, std::string* content = nullptr);

// What the last `"usage"` object that begins in the end of an answer says: prompt, cached and completion tokens.
struct Usage {
    std::optional<std::int64_t> prompt, cached, completion;
};
std::optional<Usage> find_usage(std::string_view tail);

// Why a stream is given back.
enum class Given {
    kRead,     // `data` was read and not passed on; the body stands where it stood before it
    kBlocked,  // `data` was read and followed, and is still to be written: the client's socket is full, or gone, or the
               // worker says that it failed
    kEnded,    // the worker's connection ended or failed
};

struct Return {
    std::uint64_t stream;
    Given why;
    std::string data;
};

constexpr std::size_t kTailReads = 4;
constexpr std::size_t kTailBytes = 2048;

struct Stream {
    int upstream;
    int client;
    std::int64_t left;
    std::uint64_t reads = 0;
    double last_s;
    std::array<std::string, kTailReads> tail;  // ends of the last reads, read n at n % kTailReads
    std::shared_ptr<Tokens> tokens;
};

class Relay {
public:
    Relay();  // throws std::system_error
    ~Relay();
    Relay(const Relay&) = delete;
    Relay& operator=(const Relay&) = delete;

    // Readable whenever some stream's worker has sent something.
    int fileno() const { return epoll_; }

    // Take a stream over; throws std::system_error where its sockets cannot be duplicated.
    // `tokens`: note and take out token ids; null: pass everything on as it comes.
    std::uint64_t add(int upstream, int client, std::int64_t left, std::shared_ptr<Tokens> tokens);

    // One read of every stream that has something. What is returned is still here: the caller takes it out.
    std::vector<Return> run();

    // Stop relaying; null for a stream that is not here.
    std::unique_ptr<Stream> take(std::uint64_t stream);

    const Stream* find(std::uint64_t stream) const;
    std::size_t size() const { return streams_.size(); }

private:
    void pass_on(std::uint64_t number, Stream& stream, std::vector<Return>& returned, double now_s);

    int epoll_;
    std::uint64_t next_ = 1;
    std::unordered_map<std::uint64_t, std::unique_ptr<Stream>> streams_;
    std::vector<char> buffer_;
    std::string content_;
    std::string passed_;
};

}  // namespace blockcast
