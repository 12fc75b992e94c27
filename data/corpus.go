package data

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/soliton-train/soliton/internal/store/find"
	"github.com/soliton-train/soliton/trainer"
)

// Corpus is a sequence of documents in files, for [Tokenize]. [Files], [JSONL] and [Documents] make one. It looks at names and sizes of the files
// only.
type Corpus struct {
	files []find.File
	how   string // documents are made of the files
	read  func(path string, document func(text []byte) error) error
}

// maxDocument bounds a document, which is in memory as a whole.
const maxDocument = 256 << 20

// Files returns the corpus whose documents are whole files, in path order, unpacked where they are compressed. Patterns are as for
// [trainer.Text].
func Files(patterns ...string) (*Corpus, error) {
	return Documents("files", func(path string, document func([]byte) error) error {
		r, done, err := openUnpacked(path)
		if err != nil {
			return err
		}
		defer done()
		text, err := io.ReadAll(io.LimitReader(r, maxDocument+1))
		if err != nil {
			return &trainer.DataError{Path: path, Reason: find.Cause(err)}
		}
		if len(text) > maxDocument {
			return &trainer.DataError{Path: path, Reason: fmt.Sprintf("is a document of more than %d bytes; split it", maxDocument)}
		}
		return document(text)
	}, patterns...)
}

// JSONL returns the corpus of files with a JSON object in each line, plain or compressed, whose documents are the strings in one field.
// Empty lines do not count.
func JSONL(field string, patterns ...string) (*Corpus, error) {
	return Documents(fmt.Sprintf("jsonl %q", field), func(path string, document func([]byte) error) error {
		return eachLine(path, func(line []byte) error {
			text, err := fieldOf(line, field)
			if err != nil {
				return err
			}
			return document([]byte(text))
		})
	}, patterns...)
}

// Documents returns the corpus of files that read reads: it gives document each text in a file in order, returns the first error that
// document returns, and gives the same texts for the same file each time. how names what it does, with all that the texts depend on beside
// the file: a corpus with the same name and files is not read again. Patterns are as for [trainer.Text].
func Documents(how string, read func(path string, document func(text []byte) error) error, patterns ...string) (*Corpus, error) {
	files, err := filesOf(patterns)
	if err != nil {
		return nil, err
	}
	return &Corpus{files, how, read}, nil
}

// key says which documents these are.
func (c *Corpus) key() (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", c.how)
	for _, f := range c.files {
		id, err := identity(f)
		if err != nil {
			return "", err
		}
		b.WriteString(id)
	}
	return b.String(), nil
}

// each gives all documents in order. The text is valid during the call.
func (c *Corpus) each(document func(text []byte) error) error {
	for _, f := range c.files {
		if err := c.read(f.At(), document); err != nil {
			return err
		}
	}
	return nil
}

// eachLine gives the lines of a file that are not empty. Its errors name file and line.
func eachLine(path string, take func(line []byte) error) error {
	r, done, err := openUnpacked(path)
	if err != nil {
		return err
	}
	defer done()
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 64<<10), maxDocument)
	n := 0
	for lines.Scan() {
		n++
		if len(lines.Bytes()) == 0 {
			continue
		}
		if err := take(lines.Bytes()); err != nil {
			if named := (*trainer.DataError)(nil); errors.As(err, &named) {
				return err
			}
			return &trainer.DataError{Path: path, Reason: fmt.Sprintf("line %d: %v", n, err)}
		}
	}
	if err := lines.Err(); err != nil {
		return &trainer.DataError{Path: path, Reason: fmt.Sprintf("line %d: %s", n+1, find.Cause(err))}
	}
	return nil
}

// fieldOf returns the string in a field of a JSON object.
func fieldOf(line []byte, field string) (text string, err error) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(line, &object); err != nil {
		return "", fmt.Errorf("is no JSON object: %w", err)
	}
	raw, ok := object[field]
	if !ok {
		return "", fmt.Errorf("has no field %q", field)
	}
	if err := json.Unmarshal(raw, &text); err != nil || raw[0] != '"' {
		return "", fmt.Errorf("field %q is no string", field)
	}
	return text, nil
}

// openUnpacked opens a file to be read once, unpacked where it is compressed.
func openUnpacked(path string) (r io.Reader, done func(), err error) {
	if compression(path) != "" {
		return openPlain(path)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, &trainer.DataError{Path: path, Reason: find.Cause(err)}
	}
	return f, func() { f.Close() }, nil
}
