package agree

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/timing"
)

// Local is the log of a run on one host, which agrees with itself. It lives in memory and is written behind: a [Plan] is
// committed at once and goes to the disk a moment later, because every process that hears of it ends with this one.
// All other entries are synced before Propose returns, the generation above all, so a version never repeats.
//
// The file is a sequence of frames: the length and the CRC-32C of an entry as two little-endian uint32, and the entry as
// [Encode] writes it. A frame that a killed process left unfinished is cut off when the file is opened again.
type Local struct {
	id      string
	changes chan Leadership
	file    disk   // nil: in memory only
	end     int64  // of file; of write
	dropped string // what open has cut off; "" for nothing
	writer  sync.WaitGroup
	more    chan struct{} // holds one token if pending is to be written now
	later   *time.Timer   // pending is to be written then
	broken  chan struct{} // closed: err is set

	mu      sync.Mutex
	written *sync.Cond // pending is shorter, or err is set
	state   State
	pending []byte // frames that are not known to be on the disk
	entries int    // in pending
	begun   bool   // the generation is on the disk, so a full one is waited for
	err     error  // of the disk: no entry is taken after it
	closed  bool
}

const (
	localFile = "log"
	localTerm = 1 // the only one: leadership never changes

	// maxBehind bounds how many entries may be pending.
	maxBehind = 64
)

var crcTable = crc32.MakeTable(crc32.Castagnoli)

// OpenLocal opens the log in a directory, or one in memory for "", and begins the next generation, which is greater than
// that of the log and than after. id names the host.
func OpenLocal(dir, id string, after int) (*Local, error) {
	l := &Local{id: id, changes: make(chan Leadership, 1), more: make(chan struct{}, 1), later: time.NewTimer(0), state: State{Term: localTerm, Leader: id}}
	l.written = sync.NewCond(&l.mu)
	if dir != "" {
		if err := l.open(dir); err != nil {
			return nil, fmt.Errorf("agree: %w", err)
		}
	}
	l.changes <- l.Leadership()
	if _, err := l.Propose(context.Background(), Generation{N: max(l.state.Generation, after) + 1}); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begun = true
	return l, nil
}

// Dropped says what of the file was no entry when it was opened, in a sentence; "" for nothing. Nothing of it is needed: what a log
// must not lose is the generation, and [OpenLocal] is told the newest that the run directory knows.
func (l *Local) Dropped() string { return l.dropped }

func (l *Local) open(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(dir, localFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s is no regular file: move it away", f.Name())
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	l.end = l.replay(bufio.NewReaderSize(f, 1<<16))
	if size := info.Size(); size > l.end {
		l.dropped = fmt.Sprintf("%s: the last %d of %d bytes are no whole entries, and were dropped", filepath.Join(filepath.Base(dir), localFile), size-l.end, size)
	}
	if err := errors.Join(f.Truncate(l.end), syncDir(dir)); err != nil {
		return errors.Join(err, f.Close())
	}
	l.attach(f)
	return nil
}

// disk is what a log needs of its file.
type disk interface {
	io.WriterAt
	io.Closer
	Sync() error
}

// attach has all further entries written to a file.
func (l *Local) attach(d disk) {
	l.file, l.broken = d, make(chan struct{})
	l.writer.Go(l.write)
}

// replay applies the entries of a file, and returns where the last whole one ends.
func (l *Local) replay(r io.Reader) (end int64) {
	for {
		var head [8]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return end
		}
		size := binary.LittleEndian.Uint32(head[:])
		if size > 4*MaxData {
			return end
		}
		data := make([]byte, size)
		if _, err := io.ReadFull(r, data); err != nil || crc32.Checksum(data, crcTable) != binary.LittleEndian.Uint32(head[4:]) {
			return end
		}
		e, err := Decode(data)
		if err != nil {
			return end
		}
		end += int64(len(head)) + int64(size)
		l.state, _ = l.state.Apply(l.state.Index+1, localTerm, e) // it was accepted when it was written
	}
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// write writes and syncs what is pending, until more is closed. What the disk does not take for now, it tries again now and then.
func (l *Local) write() {
	defer l.later.Stop()
	for {
		select {
		case _, open := <-l.more:
			if !open {
				return
			}
		case <-l.later.C:
		}
		l.mu.Lock()
		batch, n := l.pending, l.entries
		l.mu.Unlock()
		if n == 0 {
			continue
		}
		_, err := l.file.WriteAt(batch, l.end)
		if err == nil {
			err = l.file.Sync()
		}
		l.mu.Lock()
		if platform.MayPass(err) && l.begun && !l.closed {
			l.mu.Unlock()
			l.later.Reset(timing.Disk)
			continue
		}
		l.end += int64(len(batch))
		if l.pending, l.entries = bytes.Clone(l.pending[len(batch):]), l.entries-n; err != nil && l.err == nil {
			l.err = err
			close(l.broken)
		}
		if l.entries > 0 {
			l.later.Reset(timing.Records)
		}
		l.written.Broadcast()
		l.mu.Unlock()
	}
}

// Propose implements [Log].
func (l *Local) Propose(ctx context.Context, e Entry) (uint64, error) {
	defer context.AfterFunc(ctx, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.written.Broadcast()
	})()
	data, err := Encode(e)
	if err != nil {
		return 0, refused(e, ErrInvalid, "%v", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.entries >= maxBehind && l.err == nil && !l.closed && ctx.Err() == nil {
		l.now()
		l.written.Wait()
	}
	switch {
	case ctx.Err() != nil:
		return 0, fmt.Errorf("agree: not proposed: %w", ctx.Err())
	case l.closed:
		return 0, ErrClosed
	case l.err != nil:
		return 0, fmt.Errorf("agree: %w", l.err)
	}
	next, err := l.state.Apply(l.state.Index+1, localTerm, e)
	if err != nil {
		return 0, err
	}
	l.state = next
	if l.file == nil {
		return next.Index, nil
	}
	l.pending = binary.LittleEndian.AppendUint32(l.pending, uint32(len(data)))
	l.pending = binary.LittleEndian.AppendUint32(l.pending, crc32.Checksum(data, crcTable))
	l.pending = append(l.pending, data...)
	l.entries++
	if _, ok := e.(Plan); !ok {
		return next.Index, l.sync(ctx)
	}
	if l.entries == 1 {
		l.later.Reset(timing.Records) // a recovery has other use for the processors
	}
	return next.Index, nil
}

// now has pending written.
func (l *Local) now() {
	select {
	case l.more <- struct{}{}:
	default: // the writer has not looked yet
	}
}

// sync waits until all is on the disk; l.mu is held.
func (l *Local) sync(ctx context.Context) error {
	l.now()
	for l.entries > 0 && l.err == nil {
		if ctx.Err() != nil {
			return fmt.Errorf("%w: %w", ErrUncertain, ctx.Err())
		}
		l.written.Wait()
	}
	if l.err != nil {
		return fmt.Errorf("agree: %w", l.err)
	}
	return nil
}

// State implements [Log].
func (l *Local) State() State {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state
}

// Leadership implements [Log]: this host leads.
func (l *Local) Leadership() Leadership {
	return Leadership{Term: localTerm, Leader: l.id, Ready: true}
}

// Changes implements [Log].
func (l *Local) Changes() <-chan Leadership { return l.changes }

// Term implements [Log].
func (l *Local) Term() uint64 { return localTerm }

// Stand implements [Log]. This host leads already.
func (l *Local) Stand() {}

// Miss implements [Log]: the only server leads.
func (l *Local) Miss() {}

// Broken implements [Log].
func (l *Local) Broken() <-chan struct{} { return l.broken }

// Sync implements [Log].
func (l *Local) Sync() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sync(context.Background())
}

// Close implements [Log].
func (l *Local) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	l.written.Broadcast()
	err := l.sync(context.Background()) // a disk that is full is tried once more
	l.mu.Unlock()
	close(l.changes)
	if l.file == nil {
		return err
	}
	close(l.more)
	l.writer.Wait()
	return errors.Join(err, l.file.Close())
}
