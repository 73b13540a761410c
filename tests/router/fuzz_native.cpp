// Fuzzes the native index: mutated, truncated and hostile payloads, and any order of calls between them. A program of its own, so
// that AddressSanitizer, UBSan and the leak check see nothing but our code. Built and run by scripts/fuzz.
//
//     fuzz_native CORPUS SECONDS SEED      CORPUS: payloads, each behind its length as 4 bytes little-endian
//
// Besides what the sanitizers catch, it checks conservation (when every holder is gone, no node is left), that no payload costs
// more work than its bytes pay for, and that names with one hash do no harm.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>

#include "fuzz_work.hpp"
#include "index.hpp"

using namespace blockcast;
using Payload = std::vector<u8>;

namespace {

std::vector<Payload> read_corpus(const char* path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<char> raw((std::istreambuf_iterator<char>(file)), {});
    std::vector<Payload> corpus;
    for (std::size_t at = 0; at + 4 <= raw.size();) {
        u32 size;
        std::memcpy(&size, raw.data() + at, 4);
        if (size > raw.size() - at - 4) break;
        corpus.emplace_back(raw.begin() + static_cast<long>(at) + 4, raw.begin() + static_cast<long>(at + 4 + size));
        at += 4 + size;
    }
    return corpus;
}

class Fuzzer {
public:
    Fuzzer(std::vector<Payload> corpus, u64 seed) : corpus_(std::move(corpus)), random_(seed), index_(seed) {}

    void step() {
        const u64 action = below(64);
        if (holders_.empty() || (action == 0 && holders_.size() < 80)) {
            holders_.push_back(index_.add_holder(below(4) ? "m" : "n"));
        } else if (action == 1 && below(8) == 0) {
            const std::size_t at = below(holders_.size());
            index_.remove_holder(holders_[at]);
            holders_.erase(holders_.begin() + static_cast<long>(at));
        } else if (action == 2) {
            index_.clear(any_holder());
        } else if (action == 3) {
            index_.set_reannounces(any_holder(), below(2));
        } else if (action == 4) {
            declare();
        } else if (action < 8) {
            pins_.push_back(index_.pin(any_holder(), prompt(), scope()));
        } else if (action < 11 && !pins_.empty()) {
            index_.unpin(pins_[below(pins_.size())]);
        } else if (action < 20) {
            index_.match(prompt(), scope());
        } else if (action == 20) {
            move();
        } else if (action < 23) {
            index_.chunk_keys(prompt(), scope(), 1 + below(9));
        } else {
            ingest();
        }
    }

    // Everything given back: nothing may be left.
    bool drained() {
        for (u64 holder : holders_) index_.remove_holder(holder);
        const u64 last = index_.add_holder("m");
        const u8 empty[] = {0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x90, 0xc0};
        for (std::size_t i = 0; i < 1'000'000 && index_.stats().nodes != 0; ++i) index_.ingest(last, empty, sizeof empty);
        const Stats stats = index_.stats();
        return stats.nodes == 0 && stats.entries == 0 && stats.parked == 0 && stats.pins == 0;
    }

    u64 accepted = 0, rejected = 0;

private:
    u64 below(u64 bound) { return random_() % bound; }
    u64 any_holder() { return holders_[below(holders_.size())]; }

    // Sometimes one that an earlier call was about.
    Tokens prompt() { return Tokens{tokens_.data(), below(tokens_.size() + 1), below(2) ? &memo_ : nullptr}; }

    Scope scope() {
        Scope scope{"m", {}, {}};
        if (below(8) == 0) scope.salt = "salt";
        if (below(8) == 0) scope.lora = "lora";
        return scope;
    }

    // A holder's dump is another one's content.
    void move() {
        Dump dump = index_.begin_dump(any_holder());
        std::vector<DumpPart> parts;
        while (!dump.done) {
            for (DumpPart& part : index_.step(dump)) parts.push_back(std::move(part));
        }
        const u64 other = any_holder();
        for (const DumpPart& part : parts) {
            const Report report = index_.load(other, part);
            if (report.malformed_events != 0) {
                std::fprintf(stderr, "fuzz: a dump cannot be read: %s\n", report.malformed[0].c_str());
                std::exit(1);
            }
        }
    }

    void declare() {
        static const char* const kinds[] = {"full_attention", "mamba", "sliding_window", "chunked_local_attention", "?"};
        std::vector<Group> groups(below(4));
        for (Group& group : groups) {
            group.key = static_cast<std::int64_t>(below(4));
            group.kind = kinds[below(5)];
            group.block_size = below(40);
            if (below(2)) group.window = 1 + below(100);
        }
        index_.declare_groups(any_holder(), groups);
    }

    void ingest() {
        Payload payload = below(3) == 0 ? crafted() : corpus_[below(corpus_.size())];
        if (below(3) != 0) mutate(payload);
        // An exact-size copy on the heap: one byte read too far is caught.
        const std::unique_ptr<u8[]> exact(new u8[payload.size() + 1]);
        std::copy(payload.begin(), payload.end(), exact.get() + 1);
        const u64 before = extra_work, steps_before = work;
        const Report report = index_.ingest(any_holder(), exact.get() + 1, payload.size());
        const u64 extra = extra_work - before, steps = work - steps_before;
        // A payload may clear what earlier ones paid for: 1,024 names at once, and some 450 of a seat that was left.
        if (extra > 5000 + 4 * payload.size() || steps > 20'000 + 100 * payload.size()) {
            std::fprintf(stderr, "fuzz: %zu bytes cost %llu steps, %llu of them searching\n", payload.size(),
                         (unsigned long long)steps, (unsigned long long)extra);
            std::exit(1);
        }
        ++(report.malformed.empty() ? accepted : rejected);
        Batch batch;
        Cursor cursor;
        decode(exact.get() + 1, payload.size(), index_.digester(), batch, cursor);
        if (!batch.tokens.empty()) {
            tokens_ = batch.tokens;
            memo_ = KeyMemo{};
        }
    }

    // Events of keys that an attacker would choose: few names and many, alike in their low or high bits, groups at the ends of
    // their range, media and kinds of any letters, sizes that do not fit; well-formed, so that they reach the holder.
    Payload crafted() {
        Payload out;
        const auto put = [&](std::initializer_list<u64> bytes) { for (u64 byte : bytes) out.push_back(static_cast<u8>(byte)); };
        const auto number = [&](u64 value) {
            out.push_back(0xcf);
            for (int shift = 56; shift >= 0; shift -= 8) out.push_back(static_cast<u8>(value >> shift));
        };
        const auto text = [&](std::string_view text) { put({0xd9, text.size()}), out.insert(out.end(), text.begin(), text.end()); };
        const auto count = [&](u64 items) { put({0xdc, items >> 8, items}); };
        const u64 step = below(2) ? 1 : u64{1} << (8 * below(8)), base = below(3) ? below(40) : random_();
        const auto name = [&] {
            if (below(16) != 0) return number(base + step * below(64));
            const u64 size = below(40);
            put({0xc4, size});
            for (u64 i = 0; i < size; ++i) out.push_back(static_cast<u8>(below(2)));
        };
        static const char* const media[] = {"GPU", "gpu", "CPU_PINNED", "DISK", "", "\xff", "REMOTE", "a medium of another world"};
        static const char* const kinds[] = {"full_attention", "mamba", "sliding_window", "chunked_local_attention", "", "?"};
        const u64 events = 1 + below(12);
        put({0x93, 0xc0 + 0x0b, 0, 0, 0, 0, 0, 0, 0, 0}), count(events);
        for (u64 i = 0; i < events; ++i) {
            const u64 what = below(8), names = below(20), size = below(8) ? 1 + below(4) : random_() >> below(64);
            const u64 tokens = below(6) ? names * (size < 64 ? size : 1) : below(200);
            put({what == 0 ? 0x81u : what < 3 ? 0x84u : 0x89u}), text("type");
            text(what == 0 ? "AllBlocksCleared" : what < 3 ? "BlockRemoved" : "BlockStored");
            if (what == 0) continue;
            text("block_hashes"), count(names);
            for (u64 j = 0; j < names; ++j) name();
            text("medium"), text(media[below(std::size(media))]);
            text("group_idx"), below(4) ? put({below(5)}) : below(2) ? put({0xc0}) : (put({0xd3}), put({0x80, 0, 0, 0, 0, 0, 0, below(9)}));
            if (what < 3) continue;
            text("parent_block_hash"), below(3) ? name() : put({0xc0});
            text("token_ids"), count(tokens);
            for (u64 j = 0; j < tokens; ++j) out.push_back(static_cast<u8>(below(3)));
            text("block_size"), number(size);
            text("kv_cache_spec_kind"), text(kinds[below(std::size(kinds))]);
            text("kv_cache_spec_sliding_window"), below(2) ? number(random_() >> below(64)) : put({0xc0});
        }
        put({0xc0});
        return out;
    }

    void mutate(Payload& payload) {
        for (u64 times = 1 + below(4); times > 0 && !payload.empty(); --times) {
            const std::size_t at = below(payload.size());
            switch (below(7)) {
                case 0: payload.resize(at); break;
                case 1: payload[at] ^= static_cast<u8>(1u << below(8)); break;
                case 2: payload[at] = static_cast<u8>(random_()); break;
                case 3: payload.insert(payload.begin() + static_cast<long>(at), static_cast<u8>(random_())); break;
                case 4: payload.erase(payload.begin() + static_cast<long>(at)); break;
                case 5: payload[at] = edge_bytes[below(sizeof edge_bytes)]; break;
                default: apply_edits(payload, at); break;
            }
        }
    }

    void apply_edits(Payload& payload, std::size_t at) {
        const Payload& other = corpus_[below(corpus_.size())];
        const std::size_t from = below(other.size()), count = below(std::min<std::size_t>(64, other.size() - from) + 1);
        payload.insert(payload.begin() + static_cast<long>(at), other.begin() + static_cast<long>(from),
                       other.begin() + static_cast<long>(from + count));
    }

    // Heads of every kind of value, and the lengths around their limits.
    static constexpr u8 edge_bytes[] = {0x00, 0x7f, 0x80, 0x8f, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xc1, 0xc4, 0xc6, 0xc9, 0xca,
                                        0xcb, 0xcc, 0xcf, 0xd3, 0xd4, 0xd8, 0xd9, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xe0, 0xff};

    std::vector<Payload> corpus_;
    std::mt19937_64 random_;
    Index index_;
    std::vector<u64> holders_, pins_;
    std::vector<u32> tokens_{1, 2, 3};
    KeyMemo memo_;
};

u64 inverse(u64 odd) {
    u64 found = odd;
    for (int i = 0; i < 6; ++i) found *= 2 - odd * found;
    return found;
}

// This program knows the secret factors, so it can make names with one hash: those that the table cannot hold stay unknown.
bool bears_equal_hashes() {
    Index index(1);
    const u64 holder = index.add_holder("m");
    DumpPart part{index.digester().fingerprint(), {}, 0, {}};
    for (u64 i = 0; i < 1000; ++i) {
        const u64 half = (u64{0xDEADBEEF} << 32 | i) * inverse(secrets[1]);
        part.rows.push_back(DumpRow{(half ^ half >> 32) * inverse(secrets[0]), i, 16, 16, 1});
    }
    index.load(holder, part);
    const Stats full = index.stats();
    index.clear(holder);
    return full.entries >= 543 && full.entries < 1000 && full.nodes == full.entries && index.stats().nodes == 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: fuzz_native CORPUS SECONDS SEED\n");
        return 2;
    }
    if (!bears_equal_hashes()) {
        std::fprintf(stderr, "fuzz: names with one hash left something behind, or were not refused\n");
        return 1;
    }
    const std::vector<Payload> corpus = read_corpus(argv[1]);
    if (corpus.empty()) {
        std::fprintf(stderr, "fuzz: no payloads in %s\n", argv[1]);
        return 2;
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoi(argv[2]));
    u64 steps = 0, accepted = 0, rejected = 0;
    for (u64 seed = std::strtoull(argv[3], nullptr, 10); std::chrono::steady_clock::now() < deadline; ++seed) {
        Fuzzer fuzzer(corpus, seed);
        for (int i = 0; i < 5000; ++i, ++steps) fuzzer.step();
        if (!fuzzer.drained()) {
            std::fprintf(stderr, "fuzz: seed %llu: something is left when every holder is gone\n", (unsigned long long)seed);
            return 1;
        }
        accepted += fuzzer.accepted;
        rejected += fuzzer.rejected;
    }
    std::printf("fuzz: %llu steps, %llu payloads applied whole, %llu with something malformed, nothing wrong\n",
                (unsigned long long)steps, (unsigned long long)accepted, (unsigned long long)rejected);
    return 0;
}
