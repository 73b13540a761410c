// BlockDigests: what one router tells another of a stream. The format is router/index/dump.py's.
#include "events.hpp"

namespace blockcast {

namespace {

void read_group(Reader& reader, Digests& digests) {
    const std::size_t count = reader.map();
    for (std::size_t i = 0; i < count; ++i) {
        const std::string_view name = reader.str();
        if (name == "group_idx") {
            digests.group = optional_int(reader);
        } else if (name == "kind") {
            digests.kind = optional_str(reader);
        } else if (name == "block_size" || name == "sliding_window") {
            const std::optional<std::int64_t> value = optional_int(reader);
            (name == "block_size" ? digests.block_size : digests.window) = value;
        } else if (name == "sparse") {
            digests.sparse = reader.peek() == Type::Bool && *reader.position() == 0xc3;
            reader.skip();
        } else {
            reader.skip();
        }
    }
}

void read_blocks(Reader& reader, Digests& digests) {
    const std::size_t count = reader.array();
    if (count > kNamesMax) throw Mismatch("BlockDigests.blocks: too many rows");
    for (std::size_t i = 0; i < count; ++i) {
        if (reader.array() != 5) throw Mismatch("BlockDigests.blocks: expected rows of 5 ints");
        u64 row[5];
        for (u64& value : row) value = reader.integer().bits;
        if (row[1] >= kPrime || row[2] >> 32 != 0 || row[3] == 0 || row[3] > kBlockSizeMax || row[4] == 0 ||
            row[4] > 1u << 20) {
            throw Mismatch("BlockDigests.blocks: a row is out of range");
        }
        digests.rows.push_back(DigestRow{row[0], row[1], row[2], row[3], row[4]});
    }
}

}  // namespace

bool digests_field(Reader& reader, std::string_view name, Digests& digests) {
    if (name == "fingerprint") {
        digests.fingerprint = reader.integer().bits;
    } else if (name == "medium") {
        digests.tier = tier_of(optional_str(reader));
    } else if (name == "group") {
        read_group(reader, digests);
    } else if (name == "blocks") {
        read_blocks(reader, digests);
        return true;
    } else {
        reader.skip();
    }
    return false;
}

}  // namespace blockcast
