// Package ship brings the program of a run to the other machines: an executable file, or the pack of a Python program and its first
// values. Each machine of the run can give it, and keeps it in the user's cache folder, below its SHA-256.
package ship

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/launcher/internal/torch"
)

// Program is the program as other machines get it.
type Program struct {
	Name   string `json:"name"`
	SHA256 string `json:"sha256"`
	Size   int64  `json:"size"`

	// Of a Python program: the interpreter that was given, and its first values. Values is "" for another program.
	Python     string `json:"python,omitempty"`
	Values     string `json:"values,omitempty"` // SHA-256
	ValuesSize int64  `json:"values_size,omitempty"`

	file, values string // where they are on this machine
}

// Part is what a machine asks for: a part of the program or of its first values or, without a SHA-256, which program that is.
type Part struct {
	SHA256 string `json:"sha256"`
	At     int64  `json:"at"`
}

// Fetcher asks another machine for a part.
type Fetcher func(context.Context, Part) ([]byte, error)

const (
	maxPart = 8 << 20 // bytes
	maxSize = 1 << 40 // bytes of a program, and of first values
)

// Fetching begins what a machine says when it gets the program.
const Fetching = "fetching "

// Describe describes an executable file, or a pack.
func Describe(file string) (Program, error) {
	info, err := os.Stat(file)
	if err != nil {
		return Program{}, err
	}
	sum, err := rundir.FileSHA256(file)
	return Program{Name: filepath.Base(file), SHA256: sum, Size: info.Size(), file: file}, err
}

// DescribePython describes a Python program: its pack, its first values, and the interpreter that was given, "" for none.
func DescribePython(pack, values, python string) (Program, error) {
	p, err := Describe(pack)
	if err != nil {
		return p, err
	}
	v, err := Describe(values)
	p.Python, p.Values, p.ValuesSize, p.values = python, v.SHA256, v.Size, v.file
	return p, err
}

// Read returns a part of the program.
func (p *Program) Read(part Part) ([]byte, error) {
	path, size := p.file, p.Size
	switch {
	case part.SHA256 == "":
		return json.Marshal(p)
	case p.Values != "" && part.SHA256 == p.Values:
		path, size = p.values, p.ValuesSize
	case part.SHA256 != p.SHA256:
		return nil, errors.New("it asks for another program")
	}
	if part.At < 0 || part.At >= size {
		return nil, errors.New("it asks for what is not in the program")
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	read := make([]byte, min(maxPart, size-part.At))
	if _, err := file.ReadAt(read, part.At); err != nil {
		return nil, err
	}
	return read, nil
}

// Fetch gets the program of a run, unless it is in the cache of this machine, and its first values.
func Fetch(ctx context.Context, from Fetcher, say func(string)) (p Program, err error) {
	reply, err := from(ctx, Part{})
	if err == nil {
		err = json.Unmarshal(reply, &p)
	}
	if err != nil {
		return p, err
	}
	if p.file, err = cached(ctx, from, p, say); err == nil && p.Values != "" {
		p.values, err = cached(ctx, from, Program{Name: torch.First, SHA256: p.Values, Size: p.ValuesSize}, say)
	}
	return p, err
}

// Is reports whether p is the program that another machine describes.
func (p Program) Is(other Program) bool {
	p.file, p.values = "", ""
	return p == other
}

// File returns the executable file, or the pack, on this machine.
func (p Program) File() string { return p.file }

// Install installs a Python program that was fetched in a folder of the run directory. The interpreter is python or, if that is "", the
// one that was given for the run if it is here, else the first in PATH.
func (p *Program) Install(ctx context.Context, python, folder string) (torch.Installed, error) {
	if python == "" {
		if _, err := exec.LookPath(p.Python); err == nil {
			python = p.Python
		}
	}
	installed, err := torch.Install(ctx, python, p.file, folder)
	if err != nil {
		return installed, err
	}
	if os.Rename(p.values, installed.Values) != nil { // another file system
		if err := copyFile(p.values, installed.Values); err != nil {
			return installed, err
		}
		_ = os.Remove(p.values) // the cache may keep it
	}
	p.values = installed.Values
	return installed, nil
}

func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := rundir.NewFile(to)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		out.Discard()
		return err
	}
	return out.Commit()
}

// cached returns the path of a file in the cache, and gets it if it is not there.
func cached(ctx context.Context, from Fetcher, p Program, say func(string)) (string, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no folder for programs: %w", err)
	}
	if sum, err := hex.DecodeString(p.SHA256); err != nil || len(sum) != sha256.Size || filepath.Base(p.Name) != p.Name || p.Size < 0 || p.Size > maxSize {
		return "", errors.New("the run describes its program wrongly")
	}
	folder := filepath.Join(cache, "soliton", "programs", p.SHA256)
	path := filepath.Join(folder, p.Name)
	if sum, err := rundir.FileSHA256(path); err == nil && sum == p.SHA256 {
		return path, nil
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return "", err
	}
	say(fmt.Sprintf(Fetching+"%s, %.1f MB", p.Name, float64(p.Size)/1e6))
	file, err := rundir.NewFile(path)
	if err != nil {
		return "", err
	}
	if err := fetch(ctx, from, p, file); err != nil {
		file.Discard()
		return "", err
	}
	if err := file.Chmod(0o700); err != nil {
		file.Discard()
		return "", err
	}
	return path, file.Commit()
}

func fetch(ctx context.Context, from Fetcher, p Program, to io.Writer) error {
	sum := sha256.New()
	for at := int64(0); at < p.Size; {
		part, err := from(ctx, Part{p.SHA256, at})
		if err != nil {
			return err
		}
		if len(part) == 0 || int64(len(part)) > p.Size-at {
			return errors.New("the program has another size")
		}
		at += int64(len(part))
		if _, err := io.MultiWriter(to, sum).Write(part); err != nil {
			return err
		}
	}
	if hex.EncodeToString(sum.Sum(nil)) != p.SHA256 {
		return errors.New("the program that came has another SHA-256")
	}
	return nil
}
