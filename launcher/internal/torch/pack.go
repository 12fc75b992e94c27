package torch

import (
	"archive/zip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// PackSuffix ends the name of a pack: a zip file with a program and the Python files of its folder and of folders below, for other
// machines. Its comment names the program.
const PackSuffix = ".pyz"

// Bounds of a pack.
const (
	maxPackFiles = 5000
	maxPackBytes = 64 << 20 // of all files, unpacked
)

// notPacked are folders whose Python files are no part of a program.
var notPacked = []string{"__pycache__", "node_modules", "site-packages"}

// Pack writes the pack of a program. Equal files make equal packs.
func Pack(to io.Writer, script string) error {
	out, root := zip.NewWriter(to), filepath.Dir(script)
	if err := out.SetComment(filepath.Base(script)); err != nil {
		return err
	}
	files, left := 0, int64(maxPackBytes)
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if file != root && leftOut(file) {
				return filepath.SkipDir
			}
			return nil
		}
		if info, err := os.Stat(file); filepath.Ext(file) != ".py" || err != nil || !info.Mode().IsRegular() {
			return nil
		}
		if files++; files > maxPackFiles {
			return fmt.Errorf("more than %d Python files", maxPackFiles)
		}
		name, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		from, err := os.Open(file)
		if err != nil {
			return err
		}
		defer from.Close()
		entry, err := out.CreateHeader(&zip.FileHeader{Name: filepath.ToSlash(name), Method: zip.Deflate})
		if err != nil {
			return err
		}
		n, err := io.Copy(entry, io.LimitReader(from, left+1))
		if left -= n; left < 0 {
			return fmt.Errorf("more than %d MB of Python files", maxPackBytes>>20)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("the folder %s, of which other machines get the Python files: %w; give the program a folder of its own", root, err)
	}
	return out.Close()
}

// leftOut reports whether a folder is no part of a program: a hidden one, a virtual environment or a run directory.
func leftOut(folder string) bool {
	name := filepath.Base(folder)
	for _, other := range notPacked {
		if name == other {
			return true
		}
	}
	for _, mark := range []string{"pyvenv.cfg", "job.json"} {
		if _, err := os.Lstat(filepath.Join(folder, mark)); err == nil {
			return true
		}
	}
	return strings.HasPrefix(name, ".")
}

// unpack writes the files of a pack below a folder, and returns the path of the program.
func unpack(pack, folder string) (script string, err error) {
	fail := func(err error) (string, error) { return "", fmt.Errorf("the pack %s: %w", pack, err) }
	z, err := zip.OpenReader(pack)
	if err != nil {
		return fail(err)
	}
	defer z.Close()
	if len(z.File) > maxPackFiles {
		return fail(fmt.Errorf("it has %d files, more than %d", len(z.File), maxPackFiles))
	}
	left := int64(maxPackBytes)
	for _, f := range z.File {
		if !filepath.IsLocal(f.Name) || path.Clean(f.Name) != f.Name || path.Ext(f.Name) != ".py" {
			return fail(fmt.Errorf("it has a file with the name %.80q", f.Name))
		}
		if f.Name == z.Comment {
			script = filepath.Join(folder, f.Name)
		}
		if err := unpackFile(f, filepath.Join(folder, filepath.FromSlash(f.Name)), &left); err != nil {
			return fail(err)
		}
	}
	if script == "" {
		return fail(fmt.Errorf("it lacks its program %.80q", z.Comment))
	}
	return script, nil
}

func unpackFile(f *zip.File, to string, left *int64) error {
	from, err := f.Open()
	if err != nil {
		return err
	}
	defer from.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o700); err != nil {
		return err
	}
	file, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	n, err := io.Copy(file, io.LimitReader(from, *left+1))
	if *left -= n; *left < 0 {
		err = fmt.Errorf("it has more than %d MB", maxPackBytes>>20)
	}
	return errors.Join(err, file.Close())
}
