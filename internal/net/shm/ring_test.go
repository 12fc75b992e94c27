package shm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// memory returns what a connection shares, aligned as a mapping is.
func memory() []byte { return make([]byte, FileSize) }

// Whatever is put comes out, in order, in both directions, over many turns of the ring.
func TestRingOrder(t *testing.T) {
	mem := memory()
	draw := rand.New(rand.NewPCG(1, 2))
	for d := range 2 {
		w, r := Writer(mem, d), Reader(mem, d)
		var sent, got uint64 // bytes; byte i is a function of i
		value := func(i uint64) byte { return byte(i*31 + i>>9) }
		for range 400 {
			b := make([]byte, draw.IntN(Size+Size/4))
			for i := range b {
				b[i] = value(sent + uint64(i))
			}
			n, err := w.Put(b)
			if err != nil {
				t.Fatal(err)
			}
			if want := min(len(b), Size-int(sent-got)); n != want {
				t.Fatalf("Put took %d bytes of %d with %d in the ring, want %d", n, len(b), sent-got, want)
			}
			w.Publish()
			sent += uint64(n)
			out := make([]byte, draw.IntN(Size+Size/4))
			if n, err = r.Take(out); err != nil {
				t.Fatal(err)
			}
			if want := min(len(out), int(sent-got)); n != want {
				t.Fatalf("Take gave %d bytes of %d, want %d", n, sent-got, want)
			}
			for i, x := range out[:n] {
				if x != value(got+uint64(i)) {
					t.Fatalf("byte %d is %d", got+uint64(i), x)
				}
			}
			got += uint64(n)
		}
		if got < 10*Size {
			t.Errorf("only %d bytes passed", got)
		}
	}
}

func TestRingSleep(t *testing.T) {
	mem := memory()
	w, r := Writer(mem, 0), Reader(mem, 0)
	sleeps := func(f func() (bool, error)) bool {
		t.Helper()
		yes, err := f()
		if err != nil {
			t.Fatal(err)
		}
		return yes
	}
	if w.WakeReader() || r.WakeWriter() {
		t.Error("wakes a side that does not sleep")
	}
	if !sleeps(r.Empty) {
		t.Error("the reader of an empty ring does not sleep")
	}
	_, err := w.Put(make([]byte, 10))
	if !sleeps(r.Empty) {
		t.Error("the reader sees what is not published")
	}
	if w.Publish(); err != nil || !w.WakeReader() || w.WakeReader() {
		t.Errorf("the reader is not woken once (%v)", err)
	}
	if sleeps(r.Empty) || w.WakeReader() {
		t.Error("the reader sleeps on bytes")
	}
	if _, err := w.Put(make([]byte, Size)); err != nil || !sleeps(w.Full) {
		t.Errorf("the writer of a full ring does not sleep (%v)", err)
	}
	w.Publish()
	if _, err := r.Take(make([]byte, Size/2-1)); err != nil || r.WakeWriter() {
		t.Errorf("the writer is woken for little (%v)", err)
	}
	if _, err := r.Take(make([]byte, 1)); err != nil || !r.WakeWriter() || r.WakeWriter() {
		t.Errorf("the writer is not woken once (%v)", err)
	}
	if sleeps(w.Full) {
		t.Error("the writer sleeps although there is room")
	}
	if !sleeps(func() (bool, error) { _, _ = r.Take(make([]byte, Size)); return r.Empty() }) {
		t.Error("the reader does not sleep")
	}
	r.Awake()
	if w.WakeReader() {
		t.Error("a reader that is awake is woken")
	}
}

// The other side may publish any index.
func TestRingHostileIndex(t *testing.T) {
	for _, index := range []uint64{Size + 1, math.MaxUint64, 1 << 63} {
		mem := memory()
		binary.LittleEndian.PutUint64(mem, index)
		r := Reader(mem, 0)
		if n, err := r.Take(make([]byte, 10)); n != 0 || !errors.Is(err, ErrCorrupt) {
			t.Errorf("written %d: Take gave %d, %v", index, n, err)
		}
		if _, err := r.Empty(); !errors.Is(err, ErrCorrupt) {
			t.Errorf("written %d: Empty gave %v", index, err)
		}
	}
	for _, index := range []uint64{1, math.MaxUint64 - Size, 1 << 63} { // read what was never written, or too little
		mem := memory()
		binary.LittleEndian.PutUint64(mem[64:], index)
		w := Writer(mem, 0)
		if n, err := w.Put(make([]byte, 10)); n != 0 || !errors.Is(err, ErrCorrupt) {
			t.Errorf("read %d: Put gave %d, %v", index, n, err)
		}
		if _, err := w.Full(); !errors.Is(err, ErrCorrupt) {
			t.Errorf("read %d: Full gave %v", index, err)
		}
	}
}

// FuzzRing lets the other side write anything anywhere between our calls: no call may leave the ring's memory, and a side that is
// left alone works.
func FuzzRing(f *testing.F) {
	f.Add([]byte{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
	f.Add(bytes.Repeat([]byte{1, 255, 0, 64, 2, 130}, 20))
	f.Fuzz(func(t *testing.T, script []byte) {
		mem := make([]byte, 3*FileSize)
		for i := range mem {
			mem[i] = 0xa5
		}
		own := mem[FileSize : 2*FileSize : 2*FileSize]
		clear(own)
		w, r := Writer(own, 0), Reader(own, 1)
		buf := make([]byte, Size+100)
		for len(script) >= 3 {
			op, x := script[0], int(script[1])<<8|int(script[2])
			script = script[3:]
			switch op % 8 {
			case 0:
				if n, err := w.Put(buf[:x*5%len(buf)]); n < 0 || n > Size || err != nil && n != 0 {
					t.Fatalf("Put gave %d, %v", n, err)
				}
				w.Publish()
			case 1:
				if n, err := r.Take(buf[:x*5%len(buf)]); n < 0 || n > Size || err != nil && n != 0 {
					t.Fatalf("Take gave %d, %v", n, err)
				}
			case 2:
				_, _ = w.Full()
				w.WakeReader()
			case 3:
				_, _ = r.Empty()
				r.WakeWriter()
			case 4: // an index, of either direction
				binary.LittleEndian.PutUint64(own[64*(x%16):], uint64(x)<<(x%49))
			case 5:
				own[x*9%FileSize] = byte(x)
			case 6: // the index that Put or Take expects, and a little
				binary.LittleEndian.PutUint64(own[64:], w.at-uint64(x))
			case 7:
				binary.LittleEndian.PutUint64(own[256:], r.at+uint64(x))
			}
		}
		for i, b := range mem {
			if (i < FileSize || i >= 2*FileSize) && b != 0xa5 {
				t.Fatalf("byte %d outside of the memory was written", i-FileSize)
			}
		}
	})
}
