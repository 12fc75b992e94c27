package comm

import (
	"bytes"
	"errors"
	"io"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/soliton-train/soliton/internal/compute/tree"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/board"
)

func anyKey() *rapid.Generator[Key] {
	return rapid.Custom(func(t *rapid.T) Key {
		return Key{
			Kind: Kind(rapid.IntRange(1, int(kindEnd)-1).Draw(t, "kind")), Dir: rapid.Uint8().Draw(t, "dir"),
			Layer: rapid.Int32().Draw(t, "layer"), Micro: rapid.Int32().Draw(t, "micro"), Step: rapid.Uint64().Draw(t, "step"),
			Lo: rapid.Int64().Draw(t, "lo"), Hi: rapid.Int64().Draw(t, "hi"),
			Node: tree.Node{Lo: int(rapid.Int32Min(0).Draw(t, "node lo")), Hi: int(rapid.Int32Min(0).Draw(t, "node hi"))},
		}
	})
}

func anyFrame() *rapid.Generator[Frame] {
	session := rapid.Custom(func(t *rapid.T) id.Session {
		return id.Session{Worker: id.WorkerID(rapid.Uint32().Draw(t, "worker")), Incarnation: int(rapid.Uint32().Draw(t, "incarnation"))}
	})
	side := func(t *rapid.T, f *Frame) {
		f.Link, f.Pool, f.Lines = rapid.Uint64().Draw(t, "link"), rapid.Uint32().Draw(t, "pool"), rapid.Bool().Draw(t, "lines")
		f.Machine = Machine{Number: rapid.Uint64().Draw(t, "machine"), Processors: rapid.Uint16().Draw(t, "processors")}
	}
	return rapid.Custom(func(t *rapid.T) Frame {
		f := Frame{Type: FrameType(rapid.IntRange(1, int(frameEnd)-1).Draw(t, "type")), ID: rapid.Uint64().Draw(t, "id")}
		f.Len = max(0, frameTypes[f.Type].size)
		switch f.Type {
		case FrameHello:
			f.From, f.To = session.Draw(t, "from"), session.Draw(t, "to")
			side(t, &f)
		case FrameWelcome:
			side(t, &f)
		case FrameLine:
			f.From, f.To, f.Link = session.Draw(t, "from"), session.Draw(t, "to"), rapid.Uint64().Draw(t, "link")
		case FrameRefuse:
			f.Link, f.Reason = rapid.Uint64().Draw(t, "link"), Refusal(rapid.IntRange(1, int(refusedEnd)-1).Draw(t, "reason"))
		case FrameOpen:
			f.Key, f.Size = anyKey().Draw(t, "key"), rapid.Int64Range(0, MaxMessage).Draw(t, "size")
			f.Priority, f.Eager = Priority(rapid.Uint16().Draw(t, "priority")), rapid.Bool().Draw(t, "eager")
		case FrameOffer:
			f.Key, f.Size = anyKey().Draw(t, "key"), rapid.Int64Range(1, MaxMessage).Draw(t, "size")
			f.Priority = Priority(rapid.Uint16().Draw(t, "priority"))
			f.Addr, f.Fence = rapid.Uint64Min(1).Draw(t, "addr"), rapid.Uint64().Draw(t, "fence")
		case FrameProbe:
			f.Addr, f.Fence = rapid.Uint64().Draw(t, "addr"), rapid.Uint64().Draw(t, "fence")
			f.Board = board.Ticket{File: rapid.Uint64().Draw(t, "file"), Nonce: rapid.Uint64().Draw(t, "nonce")}
		case FrameReach:
			f.Read, f.Open, f.Place = rapid.Bool().Draw(t, "read"), rapid.Bool().Draw(t, "open"), rapid.Uint64().Draw(t, "place")
		case FrameTaken:
			f.Took = time.Duration(rapid.Int64Range(0, int64(maxTook)).Draw(t, "took"))
		case FrameData:
			f.Len = rapid.IntRange(0, MaxChunk).Draw(t, "len")
		case FrameReturn:
			f.Pool = rapid.Uint32().Draw(t, "pool")
		}
		return f
	})
}

func TestFramesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := rapid.SliceOfN(anyFrame(), 0, 5).Draw(t, "frames")
		var b []byte
		for _, f := range want {
			b = f.Append(b)
		}
		r := NewFrameReader(bytes.NewReader(b))
		for _, f := range want {
			got, err := r.Next()
			if err != nil || got != f {
				t.Fatalf("%v came back as %v, %v", f, got, err)
			}
		}
		if _, err := r.Next(); !errors.Is(err, io.EOF) {
			t.Fatalf("after the last: %v", err)
		}
	})
}

// Whatever arrives is frames, or an error: of the protocol, or of an early
// end. A frame that was accepted is the one its bytes encode.
func FuzzFrames(f *testing.F) {
	key := Key{Kind: KindGradient, Step: 3, Layer: 1, Lo: 4096, Hi: 8192, Node: tree.Node{Lo: 4, Hi: 8}}
	for _, seed := range []Frame{
		{Type: FrameHello, From: id.Session{Worker: 1, Incarnation: 1}, To: id.Session{Worker: 2, Incarnation: 1}, Pool: 1 << 20}, {Type: FrameWelcome, Link: 1, Pool: 1 << 20},
		{Type: FrameRefuse, Reason: RefusedCrossed}, {Type: FrameOpen, ID: 1, Key: key, Size: 100, Priority: Bulk, Eager: true},
		{Type: FrameData, ID: 1, Len: 0}, {Type: FrameCredit, ID: 1}, {Type: FrameDrop, ID: 2}, {Type: FrameCancel, ID: 3}, {Type: FrameReturn, Pool: 9}, {Type: FrameSync, ID: 1}, {Type: FrameSynced, ID: 1},
		{Type: FrameProbe, Addr: 4096, Fence: 7, Board: board.Ticket{File: 3, Nonce: 9}}, {Type: FrameProbe}, {Type: FrameReach, Read: true, Open: true, Place: 7}, {Type: FrameReach}, {Type: FrameOffer, ID: 2, Key: key, Size: 100, Priority: Bulk, Addr: 4096, Fence: 7}, {Type: FrameTaken, ID: 2, Took: 5},
		{Type: FrameLine, From: id.Session{Worker: 1, Incarnation: 1}, To: id.Session{Worker: 2, Incarnation: 1}, Link: 3}, {Type: FrameNoLine}, {Type: FrameAskLine},
	} {
		f.Add(seed.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		src := bytes.NewReader(b)
		r := NewFrameReader(src)
		for {
			at := len(b) - src.Len()
			got, err := r.Next()
			if err != nil {
				if !errors.Is(err, ErrProtocol) && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, errVersion) {
					t.Fatalf("error %v", err)
				}
				return
			}
			end := len(b) - src.Len()
			again := got.Append(nil)
			if got.Type != FrameHello && got.Type != FrameWelcome && got.Type != FrameRefuse && !bytes.Equal(again, b[at:end]) {
				t.Fatalf("%v came from % x and becomes % x", got, b[at:end], again)
			}
			_ = got.String()
		}
	})
}

func TestKeysAreTheirBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, b := anyKey().Draw(t, "a"), anyKey().Draw(t, "b")
		if (a == b) != bytes.Equal(a.append(nil), b.append(nil)) {
			t.Fatalf("%v and %v", a, b)
		}
	})
}
