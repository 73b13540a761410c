#include "relay.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <system_error>

namespace blockcast {
namespace {

constexpr std::size_t kReadBytes = 64 * 1024;
constexpr int kEventsMax = 256;
constexpr std::size_t kDigitsMax = 8;

double monotonic_s() {  // the clock of Python's time.monotonic()
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

int digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

int duplicate(int socket) {
    const int made = fcntl(socket, F_DUPFD_CLOEXEC, 0);
    if (made < 0) throw std::system_error(errno, std::generic_category(), "dup");
    return made;
}

std::size_t past_space(std::string_view text, std::size_t at) {
    return std::min(text.find_first_not_of(" \t\n\r\f\v", at), text.size());
}

// The whole number that `key` has after `at`; none where it has none, or more digits than are believed, or where the end of
// `text` may have cut it off.
std::optional<std::int64_t> count_of(std::string_view text, std::size_t at, std::string_view key) {
    constexpr std::size_t kCountDigitsMax = 9;
    at = text.find(key, at);
    if (at == text.npos) return std::nullopt;
    at = past_space(text, at + key.size());
    if (at == text.size() || text[at] != ':') return std::nullopt;
    at = past_space(text, at + 1);
    std::int64_t value = 0;
    const std::size_t start = at;
    for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
        if (at - start == kCountDigitsMax) return std::nullopt;
        value = value * 10 + (text[at] - '0');
    }
    const std::size_t end = past_space(text, at);
    if (at == start || end == text.size() || (text[end] != ',' && text[end] != '}')) return std::nullopt;
    return value;
}

// What every end of a stream has to do, whichever way it comes.
void close_sockets(const Stream& stream) {
    close(stream.upstream);
    close(stream.client);
}

void remember(Stream& stream, const char* data, std::size_t size) {
    const std::size_t kept = std::min(size, kTailBytes);
    stream.tail[stream.reads++ % kTailReads].assign(data + size - kept, kept);
}

// `chunk` becomes the whole events of `content` as one chunk, empty where there are none.
void frame(Tokens& tokens, const std::string& content, std::string& chunk) {
    constexpr std::size_t kLine = 10;  // eight digits and a line's end
    chunk.assign(kLine, '0');
    tokens.feed(content, chunk);
    if (chunk.size() == kLine) {
        chunk.clear();
        return;
    }
    std::size_t length = chunk.size() - kLine;
    for (std::size_t at = kLine - 3;; --at, length >>= 4) {
        chunk[at] = "0123456789abcdef"[length & 15];
        if (at == 0) break;
    }
    chunk[kLine - 2] = '\r';
    chunk[kLine - 1] = '\n';
    chunk += "\r\n";
}

}  // namespace

bool follow_chunks(const char* data, std::size_t size, std::int64_t& left, std::string* content) {
    std::int64_t at_hand = left;
    std::size_t position = 0;
    while (position < size) {
        if (at_hand > 0) {
            const std::size_t taken = std::min(static_cast<std::size_t>(at_hand), size - position);
            if (content != nullptr) content->append(data + position, taken);
            at_hand -= static_cast<std::int64_t>(taken);
            position += taken;
            continue;
        }
        std::int64_t length = 0;
        if (at_hand == kBetweenChunks) {
            const std::size_t start = position;
            for (int value; position < size && (value = digit(data[position])) >= 0; ++position) {
                length = length * 16 + value;
                if (position - start >= kDigitsMax) return false;
            }
            if (length == 0) return false;
        }
        if (size - position < 2 || data[position] != '\r' || data[position + 1] != '\n') return false;
        position += 2;
        at_hand = at_hand == kBetweenChunks ? length : kBetweenChunks;
    }
    left = at_hand;
    return true;
}

std::optional<Usage> find_usage(std::string_view tail) {
    constexpr std::string_view kUsage = "\"usage\"";  // in a JSON string its quotation marks would be escaped
    for (std::size_t at = tail.rfind(kUsage); at != tail.npos; at = at == 0 ? tail.npos : tail.rfind(kUsage, at - 1)) {
        const std::size_t colon = past_space(tail, at + kUsage.size());
        if (colon == tail.size() || tail[colon] != ':') continue;
        const std::size_t start = past_space(tail, colon + 1);
        if (start == tail.size() || tail[start] != '{') continue;
        const std::optional<std::int64_t> prompt = count_of(tail, start + 1, "\"prompt_tokens\"");
        const std::optional<std::int64_t> cached = count_of(tail, start + 1, "\"cached_tokens\"");
        if (prompt) return Usage{prompt, cached, count_of(tail, start + 1, "\"completion_tokens\"")};
        // Anthropic's Messages: the first does not hold the others.
        const std::optional<std::int64_t> computed = count_of(tail, start + 1, "\"input_tokens\"");
        if (!computed) return Usage{prompt, cached, count_of(tail, start + 1, "\"completion_tokens\"")};
        const std::optional<std::int64_t> read = count_of(tail, start + 1, "\"cache_read_input_tokens\"");
        const std::optional<std::int64_t> kept = count_of(tail, start + 1, "\"cache_creation_input_tokens\"");
        return Usage{*computed + read.value_or(0) + kept.value_or(0), read ? read : cached,
                     count_of(tail, start + 1, "\"output_tokens\"")};
    }
    return std::nullopt;
}

Relay::Relay() : epoll_(epoll_create1(EPOLL_CLOEXEC)), buffer_(kReadBytes) {
    if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
}

Relay::~Relay() {
    for (const auto& [number, stream] : streams_) close_sockets(*stream);
    close(epoll_);
}

std::uint64_t Relay::add(int upstream, int client, std::int64_t left, std::shared_ptr<Tokens> tokens) {
    auto stream = std::make_unique<Stream>();
    stream->tokens = std::move(tokens);
    stream->left = left;
    stream->last_s = monotonic_s();
    stream->upstream = duplicate(upstream);
    try {
        stream->client = duplicate(client);
    } catch (const std::system_error&) {
        close(stream->upstream);
        throw;
    }
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = next_;
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, stream->upstream, &event) != 0) {
        const int error = errno;
        close_sockets(*stream);
        throw std::system_error(error, std::generic_category(), "epoll_ctl");
    }
    streams_.emplace(next_, std::move(stream));
    return next_++;
}

std::unique_ptr<Stream> Relay::take(std::uint64_t number) {
    const auto found = streams_.find(number);
    if (found == streams_.end()) return nullptr;
    std::unique_ptr<Stream> stream = std::move(found->second);
    streams_.erase(found);
    // By hand: the original of the duplicate is open, so closing alone would leave it in the set.
    epoll_ctl(epoll_, EPOLL_CTL_DEL, stream->upstream, nullptr);
    close_sockets(*stream);
    return stream;
}

const Stream* Relay::find(std::uint64_t number) const {
    const auto found = streams_.find(number);
    return found == streams_.end() ? nullptr : found->second.get();
}

std::vector<Return> Relay::run() {
    std::array<epoll_event, kEventsMax> events;
    std::vector<Return> returned;
    const int count = epoll_wait(epoll_, events.data(), kEventsMax, 0);
    const double now_s = monotonic_s();
    for (int i = 0; i < count; ++i) {
        const std::uint64_t number = events[static_cast<std::size_t>(i)].data.u64;
        const auto found = streams_.find(number);
        if (found != streams_.end()) pass_on(number, *found->second, returned, now_s);
    }
    return returned;
}

void Relay::pass_on(std::uint64_t number, Stream& stream, std::vector<Return>& returned, double now_s) {
    const ssize_t got = recv(stream.upstream, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
    if (got <= 0) {
        returned.push_back({number, Given::kEnded, {}});
        return;
    }
    const char* data = buffer_.data();
    std::size_t size = static_cast<std::size_t>(got);
    Tokens* const tokens = stream.tokens.get();
    content_.clear();
    if (!follow_chunks(data, size, stream.left, tokens == nullptr ? nullptr : &content_)) {
        returned.push_back({number, Given::kRead, std::string(data, size)});
        return;
    }
    stream.last_s = now_s;
    if (tokens != nullptr) {
        frame(*tokens, content_, passed_);
        data = passed_.data();
        size = passed_.size();
    }
    if (size > 0) remember(stream, data, size);
    const ssize_t sent = size > 0 ? send(stream.client, data, size, MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
    const std::size_t written = sent > 0 ? static_cast<std::size_t>(sent) : 0;
    if (written != size || (tokens != nullptr && tokens->failed)) {
        returned.push_back({number, Given::kBlocked, std::string(data + written, size - written)});
    }
    // Of one long event nothing is kept: the room is everybody's, for as long as this process lives.
    if (passed_.capacity() > 4 * kReadBytes) std::string().swap(passed_);
}

}  // namespace blockcast
