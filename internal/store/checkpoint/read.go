package checkpoint

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"sort"
	"sync"

	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/store/safetensors"
)

// unreadable returns the error for a file at a path that the system failed to give.
func unreadable(path string, err error) *Error {
	kind, reason := ErrUnreadable, err
	if errors.Is(err, fs.ErrNotExist) {
		kind = ErrMissing
	}
	var at *fs.PathError
	if errors.As(err, &at) {
		reason = at.Err // the path is there already
	}
	return &Error{Path: path, Kind: kind, Reason: reason.Error(), Err: err}
}

// checkSize checks that a file of a step's checkpoint is there with its size.
func checkSize(dir interface {
	Lstat(name string) (fs.FileInfo, error)
}, step int, f File) error {
	at := path.Join(stepDir(step), f.Name)
	st, err := dir.Lstat(f.Name)
	switch {
	case err != nil:
		return unreadable(at, err)
	case !st.Mode().IsRegular():
		return &Error{Path: at, Kind: ErrMalformed, Reason: "no regular file"}
	case st.Size() < f.Size:
		return &Error{Path: at, Kind: ErrTruncated, Reason: fmt.Sprintf("it has %d bytes, of %d that the manifest says", st.Size(), f.Size)}
	case st.Size() > f.Size:
		return &Error{Path: at, Kind: ErrAltered, Reason: fmt.Sprintf("it has %d bytes, more than the %d that the manifest says", st.Size(), f.Size)}
	}
	return nil
}

// check is checkSize for a file that may lie on other hosts only.
func check(dir disk, step int, f File) error {
	err := checkSize(dir, step, f)
	if len(f.Hosts) > 0 && errors.Is(err, ErrMissing) {
		return nil
	}
	return err
}

// readManifest reads the manifest in the directory of a step.
func readManifest(dir *os.Root, step int) (*Manifest, error) {
	at := path.Join(stepDir(step), manifestName)
	st, err := dir.Lstat(manifestName) // before it is opened: that of a pipe would wait
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, &Error{Path: at, Kind: ErrUnfinished, Reason: "it is not there, so the checkpoint was never committed", Err: err}
	case err != nil:
		return nil, unreadable(at, err)
	case !st.Mode().IsRegular():
		return nil, &Error{Path: at, Kind: ErrMalformed, Reason: "no regular file"}
	}
	f, err := dir.Open(manifestName)
	if err != nil {
		return nil, unreadable(at, err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, MaxManifest+1))
	if err != nil {
		return nil, unreadable(at, err)
	}
	m, err := ParseManifest(b)
	var fault *Error
	if errors.As(err, &fault) {
		fault.Path = at
		return nil, fault
	}
	if m.Step != step {
		return nil, &Error{Path: at, Kind: ErrForeign, Reason: fmt.Sprintf("it is the manifest of step %d", m.Step)}
	}
	return m, nil
}

// Reader reads one checkpoint.
type Reader struct {
	manifest Manifest
	dir      *os.Root
	sources  []*source
	layers   [][]piece // of each layer, in ascending order
}

// piece is a range and the file it is in.
type piece struct {
	id.Range
	from *source
}

// source is one file of a checkpoint, which is opened and verified when it is needed first.
type source struct {
	file File
	dir  *os.Root
	path string // below the run directory
	rule string

	mu   sync.Mutex
	open *safetensors.File // nil until it is verified
	raw  *os.File          // the same
	err  error             // what is wrong with it
}

// Open opens the checkpoint of a step in the run directory dir. That all files are there with their sizes, unless other hosts have them,
// is checked now, their content when it is first used, or by [Reader.Verify]. Faults of files are of type [*Error].
func Open(dir string, step int) (*Reader, error) {
	root, err := openStep(dir, step)
	if err != nil {
		return nil, err
	}
	return openIn(root, step)
}

// openOf is [Open] for a run directory that is open: whatever has its place by now.
func openOf(run *os.Root, step int) (*Reader, error) {
	root, err := run.OpenRoot(stepDir(step))
	if err != nil {
		return nil, unreadable(stepDir(step), err)
	}
	return openIn(root, step)
}

// openIn is [Open] for the directory of a step, which it closes in the end.
func openIn(root *os.Root, step int) (*Reader, error) {
	m, err := readManifest(root, step)
	if err != nil {
		root.Close()
		return nil, err
	}
	r := &Reader{manifest: *m, dir: root, layers: make([][]piece, len(m.Layers))}
	for _, f := range m.Files {
		if err := check(rootDisk{root}, m.Step, f); err != nil {
			root.Close()
			return nil, err
		}
		s := &source{file: f, dir: root, path: path.Join(stepDir(m.Step), f.Name), rule: m.Rule}
		r.sources = append(r.sources, s)
		for _, rg := range f.Ranges {
			r.layers[rg.Layer] = append(r.layers[rg.Layer], piece{rg, s})
		}
	}
	for _, pieces := range r.layers {
		slices.SortFunc(pieces, func(a, b piece) int { return a.Compare(b.Range) })
	}
	return r, nil
}

// Manifest returns the manifest. What it points to must not be changed.
func (r *Reader) Manifest() Manifest { return r.manifest }

// Moments returns the names of the moments, in the order of [Reader.Read].
func (r *Reader) Moments() []string { return MomentsOf(r.manifest.Rule) }

// MomentsOf returns the names of the moments of a rule, such as "adamw".
func MomentsOf(rule string) []string { return slices.Clone(rules[rule]) }

// Verify reads all files and checks them against their digests, except those for which that is done. The
// error is an [*Error], or that of ctx.
func (r *Reader) Verify(ctx context.Context) error {
	for _, s := range r.sources {
		if _, err := s.get(ctx); err != nil {
			return err
		}
	}
	return nil
}

// VerifyFile is Verify of file i of the manifest alone.
func (r *Reader) VerifyFile(ctx context.Context, i int) error {
	_, err := r.sources[i].get(ctx)
	return err
}

// VerifyHere is Verify without the files that other hosts have.
func (r *Reader) VerifyHere(ctx context.Context) error {
	for _, s := range r.sources {
		if _, err := s.get(ctx); err != nil && !(len(s.file.Hosts) > 0 && errors.Is(err, ErrMissing)) {
			return err
		}
	}
	return nil
}

// Read reads the range [lo, hi) of a layer: the parameters into params, unless that is nil, and the moments into those of moments
// that are not nil. Each has hi-lo elements. Files are verified before anything of them is used. The error is an [*Error] where a file is
// at fault; the destinations then hold unspecified values.
func (r *Reader) Read(ctx context.Context, layer, lo, hi int, values []float32, moments [][]float32) error {
	names := rules[r.manifest.Rule]
	if layer < 0 || layer >= len(r.layers) || lo < 0 || lo > hi || hi > r.manifest.Layers[layer] {
		return fmt.Errorf("checkpoint: there is no [%d,%d) of layer %d", lo, hi, layer)
	}
	if len(moments) > len(names) {
		return fmt.Errorf("checkpoint: %d moments are wanted; %s has %d", len(moments), r.manifest.Rule, len(names))
	}
	parts := append([]string{params}, names...)
	dsts := append([][]float32{values}, moments...)
	for i, dst := range dsts {
		if dst != nil && len(dst) != hi-lo {
			return fmt.Errorf("checkpoint: room for %d numbers of %s; [%d,%d) has %d", len(dst), parts[i], lo, hi, hi-lo)
		}
	}
	pieces := r.layers[layer]
	first := sort.Search(len(pieces), func(i int) bool { return pieces[i].Hi > lo })
	for _, p := range pieces[first:] {
		from, to := max(lo, p.Lo), min(hi, p.Hi)
		if from >= to {
			break
		}
		f, err := p.from.get(ctx)
		if err != nil {
			return err
		}
		for i, dst := range dsts {
			if dst == nil {
				continue
			}
			if err := f.ReadAt(tensor(p.Range, parts[i]), from-p.Lo, dst[from-lo:to-lo]); err != nil {
				return p.from.broken(ErrUnreadable, err)
			}
		}
	}
	return nil
}

// Content returns file i of the manifest, after [Reader.Verify] or [Reader.VerifyFile]. It stays readable until Close, also if it is removed.
func (r *Reader) Content(i int) io.ReadSeeker {
	s := r.sources[i]
	return io.NewSectionReader(s.raw, 0, s.file.Size)
}

// Close closes the files.
func (r *Reader) Close() error {
	for _, s := range r.sources {
		s.mu.Lock()
		if s.open != nil {
			s.open.Close()
			s.open = nil
		}
		s.err = fs.ErrClosed
		s.mu.Unlock()
	}
	return r.dir.Close()
}

// get returns the file, verified. What it found is kept, except that ctx was done.
func (s *source) get(ctx context.Context) (*safetensors.File, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == nil && s.err == nil {
		f, err := s.load(ctx)
		if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			return nil, err
		}
		s.open, s.err = f, err
	}
	return s.open, s.err
}

// load opens the file and verifies it.
func (s *source) load(ctx context.Context) (*safetensors.File, error) {
	f, err := s.dir.Open(s.file.Name)
	if err != nil {
		return nil, unreadable(s.path, err)
	}
	tensors, err := s.verify(ctx, f)
	if err != nil {
		f.Close()
		return nil, err
	}
	s.raw = f
	return tensors, nil
}

// verify checks that f is the file of the manifest and has what that says.
func (s *source) verify(ctx context.Context, f io.ReaderAt) (*safetensors.File, error) {
	fail := func(kind error, format string, args ...any) (*safetensors.File, error) {
		return nil, &Error{Path: s.path, Kind: kind, Reason: fmt.Sprintf(format, args...)}
	}
	sum := sha256.New()
	n, err := io.Copy(sum, rundir.WithContext(ctx, io.NewSectionReader(f, 0, s.file.Size+1)))
	switch found := hex.EncodeToString(sum.Sum(nil)); {
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		return nil, err
	case err != nil:
		return nil, unreadable(s.path, err)
	case n != s.file.Size:
		return fail(ErrAltered, "its size is no longer the %d bytes that the manifest says", s.file.Size)
	case found != s.file.SHA256:
		return fail(ErrAltered, "its SHA-256 is %.12s…, and the manifest says %.12s…", found, s.file.SHA256)
	}
	tensors, err := safetensors.New(s.path, f, n)
	if err != nil {
		return nil, s.broken(ErrMalformed, err)
	}
	for _, r := range s.file.Ranges {
		for _, part := range append([]string{params}, rules[s.rule]...) {
			if n, ok := tensors.Len(tensor(r, part)); !ok || n != r.Hi-r.Lo {
				return fail(ErrMalformed, "it has no tensor %s of %d numbers", tensor(r, part), r.Hi-r.Lo)
			}
		}
	}
	return tensors, nil
}

// broken returns the error for what package safetensors found; kind is that of its own errors.
func (s *source) broken(kind error, err error) *Error {
	var bad *safetensors.Error
	if !errors.As(err, &bad) {
		return unreadable(s.path, err)
	}
	reason := bad.Reason
	if bad.Tensor != "" {
		reason = fmt.Sprintf("tensor %q %s", bad.Tensor, bad.Reason)
	}
	return &Error{Path: s.path, Kind: kind, Reason: reason, Err: err}
}
