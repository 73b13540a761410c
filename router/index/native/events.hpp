// Event batches from bytes, as router/index/events.py and events/codec.py read them: arrays and maps of every vLLM
// version, SGLang's variants, and the router's own BlockDigests. Owns the checks between bytes and index. Refuses to
// know holders.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "digest.hpp"
#include "msgpack.hpp"

namespace blockcast {

// One extra key of one block, without the LoRA name that vLLM repeats on every block.
struct ExtraKey {
    u32 block;
    bool positioned;      // (identifier, offset from the block's start): a media item
    std::int64_t offset;
    u64 media, opaque;    // what it adds to the digest as media, or as a key without a known position
    bool is_text;
    std::string_view text;
};

struct Slice {
    std::size_t begin = 0, count = 0;
};

// A run of stored blocks. Views point into the payload.
struct Stored {
    Slice names, tokens, extras;  // in the Batch
    bool has_parent = false;
    u64 parent = 0;
    u32 block_size = 0;
    u32 tier = 0;
    Text lora;  // the adapter's name, also where only its number was sent
    Text salt;  // event-level salt (SGLang)
    std::optional<std::int64_t> group;
    Text kind;
    std::optional<u64> window;

    bool dense() const { return names.count > 0 && tokens.count == names.count * block_size; }
};

struct Removed {
    Slice names;
    u32 tier = 0;
    std::optional<std::int64_t> group;
};

struct DigestRow {
    u64 name, key, end, length, copies;
};

// A chunk of another index's dump (router/index/dump.py).
struct Digests {
    u64 fingerprint = 0;
    std::optional<std::int64_t> group;
    Text kind;
    std::optional<u64> block_size, window;
    bool sparse = false;
    u32 tier = 0;
    std::vector<DigestRow> rows;
};

struct Event {
    enum class Kind { Stored, Removed, Cleared, Digests } kind;
    std::size_t index;  // into the vector of its kind
};

// One payload, decoded. Reused from payload to payload, so that steady state allocates nothing.
struct Batch {
    std::vector<Event> events;
    std::vector<Stored> stored;
    std::vector<Removed> removed;
    std::vector<Digests> digests;
    std::vector<u64> names;
    std::vector<u32> tokens;
    std::vector<ExtraKey> extras;
    std::vector<std::string> texts;  // what views of made-up texts point to
    std::vector<std::string> malformed;
    std::size_t unknown = 0;

    void clear();
};

// Told the names of an event as soon as they are read: somebody may want to ask for memory that they will need.
struct NamesRead {
    void (*told)(const void* whom, const u64* names, std::size_t count) = nullptr;
    const void* whom = nullptr;
};

// Fills `batch` (cleared first). What cannot be read is in `batch.malformed`, one message an event; if the payload as a
// whole cannot be read there is one message and no event.
void decode(const u8* payload, std::size_t size, const Digester& digester, Batch& batch, NamesRead names_read = {});

u32 tier_of(Text medium);

}  // namespace blockcast
