package raftlog

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"

	"github.com/soliton-train/soliton/internal/host/agree"
	"github.com/soliton-train/soliton/internal/platform"
	"github.com/soliton-train/soliton/internal/timing"
)

// files are what a node keeps in its directory: log.db and snapshots/.
type files struct {
	server    string // the ID, written before anything else
	log       *raftboltdb.BoltStore
	cache     raft.LogStore // in front of log, with the newest entries in memory
	snapshots raft.SnapshotStore
}

const logFile = "log.db"

// logRoom is what the disk keeps free for log.db, so that on a full disk there are votes, and a leader that says what it waits for. The log
// of a run with some hundred plans takes less.
const logRoom = 512 << 10

// Keys of what the file holds beside the entries. Raft writes the last two.
var (
	keyServer = []byte("Server")
	keyTerm   = []byte("CurrentTerm")
	keyVote   = []byte("LastVoteTerm")
)

// createFiles begins the log of a server. What is left in the directory may be of a server that has voted, so there must be nothing.
func createFiles(dir, server string, settings *raft.Config) (files, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return files{}, fmt.Errorf("agree: %w", err)
	}
	left, err := os.ReadDir(dir)
	if err != nil {
		return files{}, fmt.Errorf("agree: %w", err)
	}
	if len(left) > 0 {
		return files{}, fmt.Errorf("agree: begin a log in %s: it is not empty: %w", dir, fs.ErrExist)
	}
	f, err := openStores(dir, settings)
	if err != nil {
		return files{}, err
	}
	if err := f.log.Set(keyServer, []byte(server)); err != nil {
		return files{}, errors.Join(fmt.Errorf("agree: %w", err), f.close())
	}
	f.server = server
	return f, nil
}

// openFiles opens the log of a server.
func openFiles(dir string, settings *raft.Config) (files, error) {
	path := filepath.Join(dir, logFile)
	if err := checkFile(path); err != nil {
		return files{}, err
	}
	f, err := openStores(dir, settings)
	if err != nil {
		return files{}, err
	}
	if err := f.check(); err != nil {
		return files{}, errors.Join(&agree.DamagedError{File: path, Err: err}, f.close())
	}
	return f, nil
}

func openStores(dir string, settings *raft.Config) (files, error) {
	path := filepath.Join(dir, logFile)
	log, err := raftboltdb.New(raftboltdb.Options{
		Path: path,
		// The free list is found again at start, which keeps it out of every commit.
		BoltOptions: &bbolt.Options{Timeout: timing.Lock, NoFreelistSync: true, FreelistType: bbolt.FreelistMapType},
	})
	if errors.Is(err, bbolterrors.ErrTimeout) {
		return files{}, fmt.Errorf("%w: %s", agree.ErrInUse, dir)
	}
	if err != nil {
		return files{}, fmt.Errorf("agree: %s: %w", path, err)
	}
	snapshots, err := raft.NewFileSnapshotStoreWithLogger(dir, 2, settings.Logger)
	if err != nil {
		return files{}, errors.Join(fmt.Errorf("agree: %w", err), log.Close())
	}
	f := files{log: log, snapshots: snapshots}
	if f.cache, err = raft.NewLogCache(settings.MaxAppendEntries, log); err != nil {
		return files{}, errors.Join(err, f.close())
	}
	return f, nil
}

// check reads all that a node needs at its start and later, and sets the server.
func (f *files) check() (err error) {
	defer func() {
		if r := recover(); r != nil { // of raft and its store, which expect what they have written
			err = fmt.Errorf("%v", r)
		}
	}()
	server, err := f.log.Get(keyServer)
	if err != nil {
		return fmt.Errorf("server ID: %w", err)
	}
	f.server = string(server)
	for _, key := range [][]byte{keyTerm, keyVote} {
		if _, err := f.log.GetUint64(key); err != nil && !errors.Is(err, raftboltdb.ErrKeyNotFound) {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	begun, err := raft.HasExistingState(f.log, f.log, f.snapshots)
	if err != nil {
		return err
	}
	if !begun && agree.HostOf(f.server) == f.server {
		return errors.New("it was never begun")
	}
	return f.replay(newMachine(nil))
}

// replay applies the newest snapshot and the entries after it, committed or not.
func (f *files) replay(m *machine) error {
	kept, err := f.snapshots.List()
	if err != nil {
		return err
	}
	var index uint64
	for _, s := range kept { // like raft, which takes the newest that is whole
		_, r, err := f.snapshots.Open(s.ID)
		if err != nil {
			continue
		}
		err = m.Restore(r)
		_ = r.Close() // it was only read
		if err == nil {
			index = s.Index
			break
		}
	}
	last, err := f.log.LastIndex()
	if err != nil {
		return err
	}
	for index++; index <= last; index++ {
		var l raft.Log
		if err := f.log.GetLog(index, &l); err != nil {
			return fmt.Errorf("entry %d of %d: %w", index, last, err)
		}
		switch {
		case l.Index != index:
			return fmt.Errorf("entry %d of %d: it is entry %d", index, last, l.Index)
		case l.Type == raft.LogConfiguration:
			m.StoreConfiguration(index, raft.DecodeConfiguration(l.Data))
		case l.Type == raft.LogCommand:
			m.Apply(&l)
		}
	}
	return nil
}

// Read returns the state that follows from the log in a directory that no node has open. It counts entries whose commit the node
// did not hear of.
func Read(dir string) (agree.State, error) {
	f, err := openFiles(dir, Config{Timeout: timing.Min}.raft())
	if err != nil {
		return agree.State{}, err
	}
	m := newMachine(nil)
	err = errors.Join(f.replay(m), f.close())
	return *m.state.Load(), err
}

// setRoomAside asks the disk for it. Where there is none, or the file system cannot, votes wait for room when they are written.
func (f files) setRoomAside(dir string) {
	file, err := os.OpenFile(filepath.Join(dir, logFile), os.O_WRONLY, 0)
	if err != nil {
		return
	}
	_ = platform.Allocate(file, logRoom) // see above
	_ = file.Close()                     // nothing was written
}

func (f files) close() error { return f.log.Close() }

// votes keeps the term and the vote of a node. They must be on disk before the node continues, and raft panics where they cannot be
// written: where the disk does not take them for now, the node waits. If it is closed meanwhile, the goroutine that waits ends.
type votes struct {
	raft.StableStore
	quit <-chan struct{}
}

func (v votes) Set(key, value []byte) error {
	return v.whenItCan(func() error { return v.StableStore.Set(key, value) })
}

func (v votes) SetUint64(key []byte, value uint64) error {
	return v.whenItCan(func() error { return v.StableStore.SetUint64(key, value) })
}

func (v votes) whenItCan(write func() error) error {
	for {
		err := write()
		if !platform.MayPass(err) {
			return err
		}
		select {
		case <-time.After(timing.Disk):
		case <-v.quit:
			runtime.Goexit()
		}
	}
}
