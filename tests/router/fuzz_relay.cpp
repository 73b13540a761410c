// Fuzzes what relays answers: event streams and chunked bodies, mutated, truncated and long, in any cut. A program of its own, so
// that AddressSanitizer, UBSan and the leak check see nothing but our code. Built and run by scripts/fuzz_native.
//
//     fuzz_relay SECONDS SEED
//
// Besides what the sanitizers catch: how bytes are cut changes nothing of what is noted and passed on, nothing is lost, and no
// bytes cost more work than they pay for.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "fuzz_work.hpp"
#include "relay.hpp"

using namespace blockcast;

namespace {

constexpr unsigned long long kSteps = 2'000, kStepsPerByte = 40, kStepsPerRead = 200;

const char* const pieces[] = {
    "data: ", "data:", "{\"error\"", "{\"id\":\"x\",\"choices\":[{\"index\":0,", "\"delta\":{\"content\":\"a\"},", "\"text\":\"a\",",
    "\"token_ids\":[1,2,3]", ",\"token_ids\":[4294967295],", "\"token_ids\":null,", "\"token_ids\":[4294967296]", "\"token_ids\" : [ 7 ]",
    "{\"token_ids\":[", "\"prompt_token_ids\":[5,6]", "\"finish_reason\":\"stop\"", "\"finish_reason\":null", "}]}", "\n", "\n\n", "\r\n", "\n\r\n",
    "[DONE]", ": ping\n\n", "1,", ",", "[", "]", " ", "        ", "\"", "\\\"", "token_ids\"", "\"reasoning\"", "\"tool_calls\":[{", "x", "",
};

class Fuzzer {
public:
    explicit Fuzzer(std::uint64_t seed) : random_(seed) {}

    // Event streams.
    void events() {
        const std::string content = text();
        Notes whole(below(2) != 0), cut(whole.hides);
        const auto before = work;
        whole.feed(content);
        std::size_t reads = 0;
        const std::size_t most = below(3) == 0 ? 1 + below(4) : 1 + below(content.size() + 1);
        for (std::size_t at = 0; at < content.size(); ++reads) {
            const std::size_t size = std::min<std::size_t>(1 + below(most), content.size() - at);
            cut.feed(std::string_view(content).substr(at, size));
            at += size;
        }
        pays(work - before, 2 * content.size(), reads, "events");
        whole.out += whole.tokens.release();
        cut.out += cut.tokens.release();
        expect(whole.out == cut.out, "a cut changes what is passed on");
        expect(whole.hides || whole.out == content, "bytes are lost");
        const Tokens &a = whole.tokens, &b = cut.tokens;
        expect(a.prompt == b.prompt && a.answer == b.answer && a.spoken == b.spoken && a.last == b.last && a.events == b.events &&
               a.odd == b.odd && a.finished == b.finished, "a cut changes what is noted");
    }

    // Chunked bodies: where one stands, and what it carries.
    void chunks() {
        std::string body, content;
        chunked(body, content);
        if (below(2) != 0) mutate(body);
        const auto before = work;
        std::int64_t left = kBetweenChunks, cut = kBetweenChunks;
        std::string carried, in_parts;
        const bool followed = follow_chunks(body.data(), body.size(), left, &carried);
        std::size_t reads = 0, at = 0;
        for (; at < body.size(); ++reads) {
            const std::size_t size = std::min<std::size_t>(1 + below(64), body.size() - at);
            const std::int64_t stood = cut;
            if (!follow_chunks(body.data() + at, size, cut, &in_parts)) {
                expect(cut == stood, "what is not followed moves it");
                break;  // a line that goes on in the next read: whoever reads it goes on
            }
            at += size;
        }
        pays(work - before, 2 * body.size(), reads, "chunks");
        if (followed && at >= body.size()) expect(left == cut && carried == in_parts, "a cut changes where a body stands");
    }

    // Both, through sockets.
    void relay() {
        int upstream[2], client[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, upstream) != 0 || socketpair(AF_UNIX, SOCK_STREAM, 0, client) != 0) std::abort();
        if (fcntl(client[1], F_SETFL, O_NONBLOCK) != 0) std::abort();
        {
            Relay relay;
            const auto stream = relay.add(upstream[0], client[0], kBetweenChunks, below(2) ? std::make_shared<Tokens>(below(2)) : nullptr);
            bool gone = false;
            std::size_t sent = 0, runs = 0;
            unsigned long long spent = 0;
            while (!gone && runs < 6 && below(8) != 0) {
                std::string body, content;
                chunked(body, content);
                if (below(3) == 0) mutate(body);
                if (below(40) == 0) shutdown(upstream[1], SHUT_WR);
                if (below(40) == 0) close_once(client[1]);
                sent += body.size();  // or less: what is not read yet is paid for later
                send(upstream[1], body.data(), body.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
                const auto before = work;
                gone = !relay.run().empty();
                spent += work - before;
                pays(spent, sent, ++runs, "relay");
                char taken[4096];
                while (client[1] >= 0 && read(client[1], taken, sizeof taken) > 0) {
                }
            }
            if (below(2) != 0) expect(relay.take(stream) != nullptr, "a stream got lost");
        }
        for (int fd : {upstream[0], upstream[1], client[0]}) close(fd);
        close_once(client[1]);
    }

private:
    struct Notes {
        explicit Notes(bool hide) : hides(hide), tokens(hide) {}
        void feed(std::string_view content) { tokens.feed(content, out); }
        bool hides;
        Tokens tokens;
        std::string out;
    };

    std::uint64_t below(std::uint64_t bound) { return random_() % bound; }

    static void close_once(int& fd) {
        if (fd >= 0) close(fd);
        fd = -1;
    }

    static void expect(bool holds, const char* what) {
        if (holds) return;
        std::fprintf(stderr, "fuzz_relay: %s\n", what);
        std::abort();
    }

    static void pays(unsigned long long steps, std::size_t bytes, std::size_t reads, const char* what) {
        if (steps <= kSteps + kStepsPerByte * bytes + kStepsPerRead * reads) return;
        std::fprintf(stderr, "fuzz_relay: %s: %zu bytes in %zu reads cost %llu steps\n", what, bytes, reads, steps);
        std::abort();
    }

    std::string any() {
        const auto& piece = pieces[below(std::size(pieces))];
        return *piece == '\0' ? std::string(1, '\0') : std::string(piece);
    }

    // Mostly short; sometimes one piece a thousand times over, where quadratic work would show.
    std::string text() {
        std::string made;
        for (std::uint64_t count = below(40); count > 0; --count) {
            const std::string piece = any();
            for (std::uint64_t times = below(200) == 0 ? 1'000 + below(20'000) : 1; times > 0; --times) made += piece;
        }
        return made;
    }

    void chunked(std::string& body, std::string& content) {
        for (std::uint64_t count = 1 + below(8); count > 0; --count) {
            const std::string part = below(4) == 0 ? std::string(1 + below(3), 'x') : text();
            if (part.empty()) continue;
            char line[32];
            std::snprintf(line, sizeof line, below(2) ? "%zx\r\n" : "%zX\r\n", part.size());
            body += line + part + "\r\n";
            content += part;
        }
        if (below(8) == 0) body += "0\r\n\r\n";
    }

    void mutate(std::string& data) {
        for (std::uint64_t times = 1 + below(4); times > 0 && !data.empty(); --times) {
            const std::size_t at = below(data.size());
            switch (below(5)) {
                case 0: data.resize(at); break;
                case 1: data[at] = static_cast<char>(random_()); break;
                case 2: data.insert(at, 1, static_cast<char>(random_())); break;
                case 3: data.erase(at, 1); break;
                default: data.insert(at, "fffffffff"); break;
            }
        }
    }

    std::mt19937_64 random_;
};

// An event that takes its time: pieces of a byte, and one byte more than is kept.
bool long_event_pays() {
    for (const std::size_t size : {std::size_t{1}, std::size_t{100}, std::size_t{64} << 10}) {
        Tokens tokens(true);
        std::string out;
        const std::string piece(size, 'x');
        const std::size_t reads = size == 1 ? 200'000 : kEventBytesMax / size + 1;
        const auto before = work;
        for (std::size_t i = 0; i < reads; ++i) tokens.feed(piece, out);
        if (work - before > kSteps + kStepsPerByte * reads * size + kStepsPerRead * reads) {
            std::fprintf(stderr, "fuzz_relay: %zu reads of %zu bytes cost %llu steps\n", reads, size, work - before);
            return false;
        }
    }
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) {
        std::fprintf(stderr, "usage: fuzz_relay SECONDS SEED\n");
        return 2;
    }
    if (!long_event_pays()) return 1;
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(argv[1]));
    std::uint64_t inputs = 0;
    for (std::uint64_t seed = std::strtoull(argv[2], nullptr, 10); std::chrono::steady_clock::now() < deadline; ++seed) {
        Fuzzer fuzzer(seed);
        for (int i = 0; i < 100; ++i, inputs += 3) {
            fuzzer.events();
            fuzzer.chunks();
            fuzzer.relay();
        }
    }
    std::printf("fuzz_relay: %llu inputs, nothing wrong\n", static_cast<unsigned long long>(inputs));
    return 0;
}
