// BlockDigests: the router's own event, by which one router sends another the content of a holder in an ordinary batch
// `[ts, [event], nil]`. Other readers count and skip it. The index keeps no token ids, so only an index with the same seed
// can use the digests; the fingerprint identifies the seed.
//
//     {"type": "BlockDigests", "fingerprint": u64,
//      "group": {group_idx, kind, block_size, sliding_window, heard, sparse},
//      "medium": str, "blocks": [[name u64, key u61, end, length, copies], ...]}
#include "holder.hpp"

namespace blockcast {

namespace {

class Writer {
public:
    std::string bytes;

    void head(u8 tag, u64 value, std::size_t size) {
        bytes.push_back(static_cast<char>(tag));
        while (size-- > 0) bytes.push_back(static_cast<char>(value >> 8 * size));
    }
    void number(u64 value) {
        value < 128 ? head(static_cast<u8>(value), 0, 0) : value >> 32 == 0 ? head(0xce, value, 4) : head(0xcf, value, 8);
    }
    template <class Number>
    void number(const std::optional<Number>& value) {
        !value ? nil() : *value < Number{0} ? head(0xd3, static_cast<u64>(*value), 8) : number(static_cast<u64>(*value));
    }
    void text(std::string_view text) {
        text.size() < 32 ? head(static_cast<u8>(0xa0 | text.size()), 0, 0) : head(0xda, text.size(), 2);  // no kind has 2^16
        bytes.append(text);
    }
    void nil() { head(0xc0, 0, 0); }
    void boolean(bool value) { head(value ? 0xc3 : 0xc2, 0, 0); }
    void array(std::size_t count) { count < 16 ? head(static_cast<u8>(0x90 | count), 0, 0) : head(0xdd, count, 4); }
    void map(u8 count) { head(0x80 | count, 0, 0); }
};

void write_group(Writer& out, const Group& group) {
    out.map(6);
    out.text("group_idx"), out.number(group.key);
    out.text("kind"), group.kind ? out.text(*group.kind) : out.nil();
    out.text("block_size"), out.number(group.block_size);
    out.text("sliding_window"), out.number(group.window);
    out.text("heard"), out.boolean(group.announced);
    out.text("sparse"), out.boolean(group.sparse);
}

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
        } else if (name == "heard" || name == "sparse") {
            (name == "heard" ? digests.announced : digests.sparse) = reader.peek() == Type::Bool && *reader.position() == 0xc3;
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
            row[4] > kDumpedCopiesMax) {
            throw Mismatch("BlockDigests.blocks: a row is out of range");
        }
        digests.rows.push_back(DigestRow{row[0], row[1], row[2], row[3], row[4]});
    }
}

}  // namespace

std::string write_digests(u64 fingerprint, const Group& group, u32 tier, const std::vector<DigestRow>& rows) {
    static constexpr const char* kMedia[kTiers] = {"GPU", "CPU", "STORAGE", "REMOTE"};
    Writer out;
    out.array(3), out.number(0), out.array(1), out.map(5);
    out.text("type"), out.text("BlockDigests");
    out.text("fingerprint"), out.number(fingerprint);
    out.text("group"), write_group(out, group);
    out.text("medium"), out.text(kMedia[tier]);
    out.text("blocks"), out.array(rows.size());
    for (const DigestRow& row : rows) {
        out.array(5);
        for (u64 value : {row.name, row.key, row.end, row.length, row.copies}) out.number(value);
    }
    out.nil();
    return std::move(out.bytes);
}

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
