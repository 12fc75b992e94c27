package auth

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/soliton-train/soliton/internal/id"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var ends = Ends{From: id.Session{Worker: 3, Incarnation: 1}, To: id.Session{Worker: 1<<32 - 1, Incarnation: 7}}

// shake runs both sides of a handshake; wrap, if it is not nil, alters what the caller reads and writes.
func shake(t *testing.T, ours, theirs Key, wrap func(net.Conn) net.Conn) (answered Ends, callErr, answerErr error) {
	t.Helper()
	a, b := net.Pipe()
	near := a
	if wrap != nil {
		near = wrap(a)
	}
	end := make(chan error, 1)
	go func() {
		err := Call(near, ours, ends, nil)
		a.Close()
		end <- err
	}()
	answered, answerErr = Answer(b, theirs)
	b.Close()
	return answered, <-end, answerErr
}

func TestHandshake(t *testing.T) {
	key := NewKey()
	got, callErr, answerErr := shake(t, key, key, nil)
	if got != ends || callErr != nil || answerErr != nil {
		t.Errorf("%v, %v, %v", got, callErr, answerErr)
	}
	for _, c := range [][2]Key{{key, NewKey()}, {key, nil}, {nil, key}, {key[:31], key}} {
		if _, callErr, answerErr := shake(t, c[0], c[1], nil); !errors.Is(answerErr, ErrKey) || callErr == nil {
			t.Errorf("with two keys: %v, %v", callErr, answerErr)
		}
	}
	if s := fmt.Sprintf("%v %+v %#v %s %x", key, key, key, key, key); strings.Contains(s, fmt.Sprintf("%x", []byte(key))) || strings.Count(s, "secret") != 5 {
		t.Errorf("a key is printed as %s", s)
	}
}

// flipped flips a bit of what is read or written.
type flipped struct {
	net.Conn
	read, write int // bytes until the bit; below 0: none
}

func (f *flipped) Read(p []byte) (int, error) {
	n, err := f.Conn.Read(p)
	if f.read >= 0 && f.read < n {
		p[f.read] ^= 1
	}
	f.read -= n
	return n, err
}

func (f *flipped) Write(p []byte) (int, error) {
	p = bytes.Clone(p)
	if f.write >= 0 && f.write < len(p) {
		p[f.write] ^= 1
	}
	f.write -= len(p)
	return f.Conn.Write(p)
}

// Each bit of the handshake counts for the side that reads it.
func TestAnotherBit(t *testing.T) {
	key := NewKey()
	for i := range headerSize + proofSize {
		if _, _, err := shake(t, key, key, func(c net.Conn) net.Conn { return &flipped{c, -1, i} }); err == nil {
			t.Errorf("a proof with another bit in byte %d is taken", i)
		}
	}
	for i := range headerSize + challengeSize + headerSize + confirmSize {
		if _, err, _ := shake(t, key, key, func(c net.Conn) net.Conn { return &flipped{c, i, -1} }); err == nil {
			t.Errorf("an answerer with another bit in byte %d is taken", i)
		}
	}
}

// An answerer cannot be made to prove itself to itself: what it says as answerer proves nothing as caller, and the proof of one
// connection proves nothing on the next.
func TestReflection(t *testing.T) {
	key := NewKey()
	confirmed := bytes.NewBuffer(nil)
	a, b := net.Pipe()
	end := make(chan error, 1)
	go func() {
		_, err := Answer(b, key)
		b.Close()
		end <- err
	}()
	if err := Call(struct {
		io.Reader
		io.Writer
	}{io.TeeReader(a, confirmed), a}, key, ends, nil); err != nil {
		t.Fatal(err)
	}
	if err := <-end; err != nil {
		t.Fatal(err)
	}
	a.Close()
	mac := confirmed.Bytes()[headerSize+challengeSize+headerSize:]

	a, b = net.Pipe()
	go func() {
		_, err := Answer(b, key)
		b.Close()
		end <- err
	}()
	if _, err := receive(a, challenge, challengeSize); err != nil {
		t.Fatal(err)
	}
	a.Write(append(ends.Append(append(header(proof, proofSize), make([]byte, nonceSize)...)), mac...))
	if err := <-end; !errors.Is(err, ErrKey) {
		t.Errorf("got %v", err)
	}
	a.Close()
}

// A lobby that is full closes the oldest connection.
func TestLobby(t *testing.T) {
	l := NewLobby(2)
	var far []net.Conn
	enter := func() net.Conn {
		a, b := net.Pipe()
		far = append(far, b)
		l.Enter(a)
		return a
	}
	first, second, third := enter(), enter(), enter()
	if _, err := far[0].Read(make([]byte, 1)); !errors.Is(err, io.EOF) || l.Leave(first) {
		t.Errorf("the oldest stays: %v", err)
	}
	if !l.Leave(second) || l.Leave(second) {
		t.Error("the second is gone, or there twice")
	}
	fourth := enter()
	far[2].SetReadDeadline(time.Now())
	if _, err := far[2].Read(make([]byte, 1)); errors.Is(err, io.EOF) {
		t.Error("closed, although there was room")
	}
	l.Close()
	if l.Leave(third) || l.Leave(fourth) || l.Enter(first) {
		t.Error("a closed lobby holds connections")
	}
	second.Close()
	for _, c := range far {
		c.Close()
	}
}

// Connections that are served are bounded, also where those that were closed are slow to leave.
func TestLobbyBound(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := NewLobby(2)
		var served []net.Conn
		for range 4 {
			c, _ := net.Pipe()
			l.Enter(c)
			served = append(served, c)
		}
		fifth, _ := net.Pipe()
		entered := false
		go func() { entered = l.Enter(fifth) }()
		if synctest.Wait(); entered {
			t.Error("five are served in a lobby for two")
		}
		l.Leave(served[0])
		if synctest.Wait(); !entered {
			t.Error("there is room, and the next does not get in")
		}
		go l.Enter(served[0])
		synctest.Wait()
		l.Close()
		synctest.Wait()
	})
}

func FuzzAnswer(f *testing.F) {
	f.Add([]byte(magic))
	f.Add(append(header(proof, proofSize), make([]byte, proofSize)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		rw := struct {
			io.Reader
			io.Writer
		}{bytes.NewReader(b), io.Discard}
		if _, err := Answer(rw, NewKey()); err == nil {
			t.Error("random bytes prove a key")
		}
		if err := Call(rw, NewKey(), ends, nil); err == nil {
			t.Error("random bytes prove a key")
		}
	})
}
