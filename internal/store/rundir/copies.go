package rundir

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// Where every host of a run has a run directory of its own, the leader writes records, and the others keep copies of them, so that
// any of them can be read there, and the next leader continues them.

// copied are the files of which hosts keep copies: line files, which grow, and these, which are written as a whole.
var (
	wholeFiles = []string{"job.json", "data.json", "summary.json", othersLog}
	copied     = slices.Concat(wholeFiles, lineFiles)
)

// maxWhole bounds a file that is copied as a whole, in bytes.
const maxWhole = 8 << 20

var sums = crc32.MakeTable(crc32.Castagnoli)

// Mark says how much of a record there is.
type Mark struct {
	Name string
	Size int64
	Sum  uint32 // CRC-32C
}

// Marks returns how much there is of each record that is copied; those that are not there are left out.
func Marks(dir string) (all []Mark, err error) {
	for _, name := range copied {
		f, err := Open(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		m := Mark{Name: name}
		m.Size, m.Sum, err = sum(f)
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

func sum(r io.Reader) (size int64, s uint32, err error) {
	h := crc32.New(sums)
	size, err = io.Copy(h, r)
	return size, h.Sum32(), err
}

// Part is what a record holds from an offset on.
type Part struct {
	Name string
	At   int64
	Data []byte
}

// Copier finds what another host's copies of the records in a directory lack.
type Copier struct {
	open func(name string) (source, error)
	has  map[string]int64       // bytes of each line file that the other host has
	seen map[string]fs.FileInfo // of whole files that the other host has
}

// source is an open file that is copied.
type source interface {
	io.ReaderAt
	io.Closer
	Stat() (fs.FileInfo, error)
}

// keptOpen is a record that is open for as long as its run.
type keptOpen struct{ lineFile }

func (keptOpen) Close() error { return nil }

// NewCopier returns the copier for a host whose copies of the records in dir have these marks. What differs is copied again from its beginning.
func NewCopier(dir string, marks []Mark) *Copier {
	return newCopier(func(name string) (source, error) { return Open(filepath.Join(dir, name)) }, marks)
}

// Copier is [NewCopier] for the directory of a run that this process leads. The records are the run's whatever has the place of the directory by then.
func (d *Dir) Copier(marks []Mark) *Copier { return newCopier(d.openRecord, marks) }

func (d *Dir) openRecord(name string) (source, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.lines[name]; f != nil {
		return keptOpen{f}, nil
	}
	if f := d.held[name]; f != nil {
		return keptOpen{f}, nil
	}
	if d.gone != nil {
		return nil, d.gone
	}
	return Open(d.File(name))
}

func newCopier(open func(name string) (source, error), marks []Mark) *Copier {
	c := &Copier{open: open, has: make(map[string]int64), seen: make(map[string]fs.FileInfo)}
	for _, m := range marks {
		if !slices.Contains(copied, m.Name) {
			continue
		}
		f, err := open(m.Name)
		if err != nil {
			continue
		}
		if size, s, err := sum(io.NewSectionReader(f, 0, max(m.Size, 0))); err == nil && size == m.Size && s == m.Sum {
			if info, err := f.Stat(); err == nil && info.Size() == size {
				c.seen[m.Name] = info
			}
			c.has[m.Name] = size
		}
		_ = f.Close()
	}
	return c
}

// Next returns the next part of each record of which the other host lacks something, of at most limit bytes unless it is a whole file.
func (c *Copier) Next(limit int) (parts []Part, err error) {
	for _, name := range copied {
		next := c.lines
		if slices.Contains(wholeFiles, name) {
			next = c.whole
		}
		p, more, e := next(name, limit)
		if err = errors.Join(err, e); more {
			parts = append(parts, p)
		}
	}
	return parts, err
}

func (c *Copier) whole(name string, _ int) (p Part, more bool, err error) {
	f, err := c.open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return p, false, nil
	}
	if err != nil {
		return p, false, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return p, false, err
	}
	if was := c.seen[name]; was != nil && os.SameFile(was, info) && was.ModTime().Equal(info.ModTime()) {
		return p, false, nil
	}
	if info.Size() > maxWhole {
		return p, false, fmt.Errorf("%s has more than %d MiB", name, maxWhole>>20)
	}
	p = Part{Name: name, Data: make([]byte, info.Size())}
	if _, err := f.ReadAt(p.Data, 0); err != nil {
		return p, false, fmt.Errorf("%s: %w", name, cause(err))
	}
	c.seen[name] = info
	return p, true, nil
}

func (c *Copier) lines(name string, limit int) (p Part, more bool, err error) {
	f, err := c.open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return p, false, nil
	}
	if err != nil {
		return p, false, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return p, false, err
	}
	has, known := c.has[name]
	if info.Size() < has {
		has, known = 0, false // it was emptied
	}
	if known && info.Size() == has {
		return p, false, nil
	}
	p = Part{Name: name, At: has, Data: make([]byte, min(int64(limit), info.Size()-has))}
	if _, err := f.ReadAt(p.Data, has); err != nil {
		return p, false, fmt.Errorf("%s: %w", name, cause(err))
	}
	c.has[name] = has + int64(len(p.Data))
	return p, true, nil
}

func readAtMost(path string, limit int64) ([]byte, error) {
	f, err := Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	var text []byte
	if info.Size() <= limit {
		text, err = io.ReadAll(io.LimitReader(f, limit+1))
	}
	if err == nil && max(info.Size(), int64(len(text))) > limit {
		err = &fs.PathError{Op: "read", Path: path, Err: fmt.Errorf("has more than %d MiB", limit>>20)}
	}
	return text, err
}

// ErrNoRecord means that a part is of no record that is copied, or does not continue the copy that is there.
var ErrNoRecord = errors.New("rundir: not a part of a record")

// Keep makes a part the end of the copy of its record. With the job, the directory holds a run, and runs/latest points to it.
func Keep(dir string, p Part) error {
	path := filepath.Join(dir, p.Name)
	switch {
	case slices.Contains(wholeFiles, p.Name) && p.At == 0:
		err := WriteFile(path, p.Data)
		if err == nil && p.Name == "job.json" {
			err = Attach(dir, dir, false).link()
		}
		return err
	case !slices.Contains(lineFiles, p.Name):
		return fmt.Errorf("%w: %.40q", ErrNoRecord, p.Name)
	}
	f, err := openFile(path, os.O_CREATE|os.O_WRONLY)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	switch {
	case err != nil:
	case p.At < 0 || p.At > info.Size():
		err = fmt.Errorf("%w: offset %d of %s, which has %d bytes", ErrNoRecord, p.At, p.Name, info.Size())
	case p.At < info.Size():
		err = f.Truncate(p.At)
	}
	if err == nil {
		_, err = f.WriteAt(p.Data, p.At)
	}
	return errors.Join(err, f.Close())
}

// Takes returns why nothing can be written to the copy of a record.
func Takes(dir, name string) error {
	f, err := openFile(filepath.Join(dir, name), os.O_CREATE|os.O_WRONLY)
	if err != nil {
		return err
	}
	return f.Close()
}

// Again makes a directory with copies again after it was removed, or a file in it, which err is of. It reports false where that is not the cause.
func Again(dir string, err error) bool {
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, ErrNoRecord) {
		return false
	}
	return errors.Join(os.MkdirAll(dir, 0o700), os.MkdirAll(filepath.Join(dir, "log"), 0o700)) == nil
}

// Inherit makes a directory with copies one that [Dir.Resume] continues: job is the job.json that the hosts have agreed on, for the
// case that its copy has not arrived, or that of what the run was before it was changed.
func Inherit(dir string, job []byte) error {
	for _, name := range lineFiles {
		if err := Takes(dir, name); err != nil {
			return err
		}
	}
	path := filepath.Join(dir, "job.json")
	var was, is Job
	if len(job) == 0 || json.Unmarshal(job, &is) != nil {
		return nil
	}
	if found, err := readJSON(path, &was); err == nil && found {
		if was.Plain().ID() == is.Plain().ID() {
			return nil
		}
		is.Started = was.Started
		text, err := json.Marshal(is)
		if err != nil {
			return err
		}
		job = text
	}
	return WriteFile(path, job)
}

// Remake makes again what was removed of a run's records, or is damaged, while no process had them open: job.json, by the job that was agreed, and line files,
// without lines. The error is [ErrInUse], wrapped, if the directory has another run.
func Remake(dir string, job []byte) error {
	var is Job
	if err := json.Unmarshal(job, &is); err != nil {
		return fmt.Errorf("%s %w", dir, ErrNoRun)
	}
	if err := is.Eras().Own(dir); err != nil {
		return err
	}
	return Inherit(dir, job)
}
