// Event batches from bytes, as events/codec.py reads them: arrays and maps of every vLLM version, SGLang's variants, and the
// router's own BlockDigests. Owns the checks between bytes and index. Refuses to know holders.
#pragma once

#include <cstring>
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
    Slice names, tokens, extras, skipped;  // in the Batch; `skipped`: tokens between an ancestor and the parent
    bool has_parent = false, has_ancestor = false;
    u64 parent = 0, ancestor = 0;
    u32 block_size = 0;
    u32 tier = 0;
    Text lora;  // the adapter's name, also where only its number was sent
    Text salt;  // event-level salt (SGLang)
    std::optional<std::int64_t> group;
    Text kind;
    std::optional<u64> window;

    bool bare() const { return tokens.count == 0; }  // names only: copies of blocks that somebody has spelt out
    bool dense() const { return names.count > 0 && !bare() && tokens.count == names.count * block_size; }
};

struct Removed {
    Slice names, copies;  // in the Batch; `copies`: how many are left of each name, where the event says
    u32 tier = 0;
    std::optional<std::int64_t> group;
};

struct DigestRow {
    u64 name, key, end, length, copies;
};

// A chunk of another index's dump.
struct Digests {
    u64 fingerprint = 0;
    std::optional<std::int64_t> group;
    Text kind;
    std::optional<u64> block_size, window;
    bool heard = true, sparse = false;
    u32 tier = 0;
    std::vector<DigestRow> rows;
};

struct Event {
    enum class Kind { Stored, Removed, Cleared, Digests } kind;
    std::size_t index;  // into the vector of its kind; of Cleared: 1 + the tier that is cleared, 0 for all
};

// Bounds of one event and of one payload. What is beyond them is malformed.
constexpr std::size_t kNamesMax = 1u << 16, kTokensMax = 1u << 22, kExtrasMax = 1u << 16, kEventsMax = 1u << 20;
constexpr u64 kCopiesTold = 1u << 20;       // of one name, in a dump
constexpr std::size_t kKindMax = 64;        // bytes
constexpr std::size_t kMalformedKept = 16;  // messages; all are counted

// One payload, decoded. Reused from payload to payload, so that steady state allocates nothing.
struct Batch {
    std::vector<Event> events;
    std::vector<Stored> stored;
    std::vector<Removed> removed;
    std::vector<Digests> digests;
    std::vector<u64> names;
    std::vector<u32> tokens, skipped, copies;
    std::vector<ExtraKey> extras;
    std::vector<std::string> texts;  // what views of made-up texts point to
    std::vector<std::string> malformed;  // the first ones
    std::size_t malformed_events = 0, unknown = 0;

    void report(std::string what) {
        if (++malformed_events <= kMalformedKept) malformed.push_back(std::move(what));
    }

    void clear();
};

// Told the names of an event as soon as they are read: somebody may want to ask for memory that they will need.
struct NamesRead {
    void (*told)(const void* whom, const u64* names, std::size_t count) = nullptr;
    const void* whom = nullptr;
};

// How far a payload has been read.
struct Cursor {
    std::size_t at = 0;                          // bytes
    std::size_t event = 0, events = 0, parts = 0;  // the next one, of how many
    bool whole = false;  // its end has been seen: what is read may be applied
    bool done = false;
};

// Fills `batch` (cleared first) with the next slice of the payload: whole events, some milliseconds of work, nearly always
// all there are. An event that cannot be read is a message in `batch.malformed`, and costs only itself. A payload that cannot be
// read to its end is one message and nothing else: where it is more than a slice, the first ones look for its end and give
// nothing.
void decode(const u8* payload, std::size_t size, const Digester& digester, Batch& batch, Cursor& cursor, NamesRead names_read = {});

u32 tier_of(Text medium);

// -- fields: their names in maps, their places in arrays, the values that several have --

constexpr std::size_t kBlockSizeMax = (1u << 24) - 1;

enum class Field : u8 {
    BlockHashes, Parent, TokenIds, BlockSize, LoraId, Medium, LoraName, ExtraKeys, GroupIdx, Kind, Window,
    CacheSalt, MediaKeys, Ancestor, SkippedTokens, SkippedKeys, Copies, Ignored,
};
constexpr const char* kFieldNames[] = {
    "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "cache_salt", "mm_keys",
    "skipped_parent_block_hash", "skipped_token_ids", "skipped_extra_keys", "remaining_copy_counts",
};

// Fields in the order of positional events.
constexpr Field kStoredOrder[] = {
    Field::BlockHashes, Field::Parent, Field::TokenIds, Field::BlockSize, Field::LoraId, Field::Medium,
    Field::LoraName, Field::ExtraKeys, Field::GroupIdx, Field::Kind, Field::Window,
    Field::Ignored /* locality */, Field::Ignored /* ownership */, Field::Ignored /* session_id */,
    Field::Ignored /* lookahead_token_ids */, Field::CacheSalt,
};
constexpr Field kRemovedOrder[] = {Field::BlockHashes, Field::Medium, Field::GroupIdx};

// `text == literal`, with the length known to the compiler: no call.
template <std::size_t N>
inline bool is(std::string_view text, const char (&literal)[N]) {
    return text.size() == N - 1 && std::memcmp(text.data(), literal, N - 1) == 0;
}

inline Field field_named(std::string_view name) {
    switch (name.size()) {
        case 6: return is(name, "medium") ? Field::Medium : Field::Ignored;
        case 7: return is(name, "lora_id") ? Field::LoraId : is(name, "mm_keys") ? Field::MediaKeys : Field::Ignored;
        case 9: return is(name, "token_ids") ? Field::TokenIds : is(name, "lora_name") ? Field::LoraName
                     : is(name, "group_idx") ? Field::GroupIdx : Field::Ignored;
        case 10: return is(name, "block_size") ? Field::BlockSize : is(name, "extra_keys") ? Field::ExtraKeys
                      : is(name, "cache_salt") ? Field::CacheSalt : Field::Ignored;
        case 12: return is(name, "block_hashes") ? Field::BlockHashes : Field::Ignored;
        case 17: return is(name, "parent_block_hash") ? Field::Parent
                      : is(name, "skipped_token_ids") ? Field::SkippedTokens : Field::Ignored;
        case 18: return is(name, "kv_cache_spec_kind") ? Field::Kind
                      : is(name, "skipped_extra_keys") ? Field::SkippedKeys : Field::Ignored;
        case 21: return is(name, "remaining_copy_counts") ? Field::Copies : Field::Ignored;
        case 25: return is(name, "skipped_parent_block_hash") ? Field::Ancestor : Field::Ignored;
        case 28: return is(name, "kv_cache_spec_sliding_window") ? Field::Window : Field::Ignored;
        default: return Field::Ignored;
    }
}

inline std::optional<std::int64_t> optional_int(Reader& reader) {
    if (reader.take_nil()) return std::nullopt;
    const Reader::Int value = reader.integer();
    if (!value.negative && value.bits >> 63 != 0) throw Mismatch("expected an int less than 2^63");
    return static_cast<std::int64_t>(value.bits);
}

inline Text optional_str(Reader& reader) {
    if (reader.take_nil()) return std::nullopt;
    return reader.text();
}

// Reads one field of a BlockDigests event; true where it was `blocks`.
bool digests_field(Reader& reader, std::string_view name, Digests& digests);

}  // namespace blockcast
