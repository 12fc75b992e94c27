package gossip

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"

	"github.com/hashicorp/memberlist"
	"github.com/vmihailenco/msgpack/v5"
)

// The library's packets, as far as they are read here. A packet is one message;
// its first byte is its type. With a label (Config.Job), a header with the label is in
// front of it. With a key it is, behind that header, one byte of version (1), a
// nonce of 12 bytes and the AES-GCM ciphertext with its tag, authenticated with
// the label.
//
//	suspect   3   msgpack map: Incarnation, Node, From
//	alive     4   msgpack map: Incarnation, Node, ...
//	dead      5   like suspect
//	compound  7   number n (1 byte), n lengths (2 bytes each, big-endian), n messages
//	checksum  12  CRC-32 (4 bytes), a message
//	error     13  msgpack map, on streams only
//
// On a stream, an encrypted message has a byte (10) and its length (4 bytes) in front, which are authenticated as well, before the label.
//
// These numbers are part of the library's protocol and never change.
// What cannot be read is skipped: the library judges it for itself.
const (
	suspectType  = 3
	aliveType    = 4
	deadType     = 5
	compoundType = 7
	checksumType = 12
	errorType    = 13

	encryptedType = 10
)

const version, nonce = 1, 12 // bytes of an encrypted message

// maxNesting bounds messages in messages; the library makes three.
const maxNesting = 4

// A claim is a message about a member.
type claim struct {
	kind        byte   // suspectType, aliveType or deadType
	Incarnation uint32 // the library's own: counts what Node said about itself
	Node        string
	From        string // the member that says it; "" in alive
}

// reader reads packets.
type reader struct {
	aead cipher.AEAD // nil: packets are not encrypted
}

// newReader returns a reader for the key, which is valid or empty.
func newReader(key []byte) (reader, error) {
	if len(key) == 0 {
		return reader{}, nil
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return reader{}, err
	}
	aead, err := cipher.NewGCM(block)
	return reader{aead}, err
}

// claims calls found for each claim in the packet. The packet stays as it is. It reports whether a member can have sent the packet.
func (r reader) claims(packet []byte, found func(claim)) bool {
	b, label, err := memberlist.RemoveLabelHeaderFromPacket(packet)
	if err != nil {
		return false
	}
	b, ok := r.decrypt(b, []byte(label))
	if ok {
		messages(b, maxNesting, found)
	}
	return ok
}

// refusal reports whether a message on a stream says that what came could not be read.
func (r reader) refusal(b []byte, label string) bool {
	const head = 5
	if r.aead != nil && len(b) > head && b[0] == encryptedType {
		b, _ = r.decrypt(b[head:], append(b[:head:head], label...))
	}
	return len(b) > 0 && b[0] == errorType
}

// decrypt returns what was encrypted with the key; without a key, b.
func (r reader) decrypt(b, authenticated []byte) ([]byte, bool) {
	if r.aead == nil {
		return b, true
	}
	if len(b) < version+nonce || b[0] != 1 {
		return nil, false
	}
	b, err := r.aead.Open(nil, b[version:version+nonce], b[version+nonce:], authenticated)
	return b, err == nil
}

func messages(b []byte, depth int, found func(claim)) {
	if len(b) == 0 || depth == 0 {
		return
	}
	kind, b := b[0], b[1:]
	switch kind {
	case suspectType, aliveType, deadType:
		c := claim{kind: kind}
		// Not msgpack.Unmarshal: its pooled decoders keep a buffer, which a length beyond the packet makes larger each time.
		if msgpack.NewDecoder(bytes.NewReader(b)).Decode(&c) == nil {
			found(c)
		}
	case checksumType:
		if len(b) > 4 {
			messages(b[4:], depth-1, found)
		}
	case compoundType:
		if len(b) == 0 || len(b) < 1+2*int(b[0]) {
			return
		}
		n := int(b[0])
		lengths, rest := b[1:1+2*n], b[1+2*n:]
		for ; len(lengths) > 0; lengths = lengths[2:] {
			size := int(binary.BigEndian.Uint16(lengths))
			if len(rest) < size {
				return
			}
			messages(rest[:size], depth-1, found)
			rest = rest[size:]
		}
	}
}
