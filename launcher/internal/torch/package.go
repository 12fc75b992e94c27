package torch

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

//go:embed python/soliton/*.py
var files embed.FS

// unpackPackage writes the Python package into the user's cache, below a folder named after its content, and returns that folder, which is
// for PYTHONPATH.
func unpackPackage() (folder string, err error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("a folder for the Python package: %w", err)
	}
	return unpackBelow(filepath.Join(cache, "soliton", "python"))
}

func unpackBelow(parent string) (folder string, err error) {
	content, err := fs.Sub(files, "python")
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	if err := fs.WalkDir(content, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := fs.ReadFile(content, path)
		fmt.Fprintf(sum, "%s %d\n%s", path, len(text), text)
		return err
	}); err != nil {
		return "", err
	}
	folder = filepath.Join(parent, hex.EncodeToString(sum.Sum(nil)))
	if _, err := os.Stat(folder); err == nil {
		return folder, nil
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("a folder for the Python package: %w", err)
	}
	made, err := os.MkdirTemp(parent, "new-")
	if err != nil {
		return "", fmt.Errorf("a folder for the Python package: %w", err)
	}
	defer os.RemoveAll(made)
	if err := errors.Join(os.CopyFS(made, content), os.Chmod(made, 0o755)); err != nil {
		return "", fmt.Errorf("write the Python package: %w", err)
	}
	if err := os.Rename(made, folder); err != nil && !errors.Is(err, fs.ErrExist) {
		if _, there := os.Stat(folder); there != nil { // another process was first
			return "", fmt.Errorf("write the Python package: %w", err)
		}
	}
	return folder, nil
}
