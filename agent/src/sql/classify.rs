//! Whether a statement only reads, by its text.
//!
//! This decides which of two queues it waits in, not what it may do. In doubt it writes: only what is
//! made of words and functions that are known to read is a read.

/// The queue that a query waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Write,
}

/// Statements that read, if nothing in them writes.
const READERS: [&str; 7] = [
    "select", "values", "table", "with", "show", "explain", "fetch",
];

/// Words that make any statement a write, or a read that locks.
const WRITERS: [&str; 8] = [
    "insert", "update", "delete", "merge", "into", "share", "analyze", "analyse",
];

/// What may stand before a parenthesis: words of the grammar, types with a length, and functions of
/// Postgres that change nothing.
const CALLABLE: &[&str] = &[
    // grammar
    "all",
    "and",
    "any",
    "array",
    "as",
    "between",
    "by",
    "case",
    "cast",
    "check",
    "cube",
    "distinct",
    "else",
    "except",
    "exists",
    "explain",
    "filter",
    "from",
    "group",
    "having",
    "ilike",
    "in",
    "intersect",
    "is",
    "join",
    "lateral",
    "like",
    "limit",
    "materialized",
    "not",
    "offset",
    "on",
    "or",
    "over",
    "row",
    "rollup",
    "select",
    "sets",
    "some",
    "table",
    "then",
    "union",
    "using",
    "values",
    "when",
    "where",
    "with",
    "within",
    // types
    "bit",
    "char",
    "character",
    "decimal",
    "float",
    "interval",
    "numeric",
    "time",
    "timestamp",
    "timestamptz",
    "varchar",
    "varying",
    // functions
    "abs",
    "age",
    "array_agg",
    "array_length",
    "avg",
    "bool_and",
    "bool_or",
    "cardinality",
    "ceil",
    "char_length",
    "coalesce",
    "concat",
    "concat_ws",
    "count",
    "current_setting",
    "date_part",
    "date_trunc",
    "dense_rank",
    "every",
    "exp",
    "extract",
    "first_value",
    "floor",
    "format",
    "generate_series",
    "greatest",
    "initcap",
    "json_agg",
    "json_build_array",
    "json_build_object",
    "jsonb_agg",
    "jsonb_array_elements",
    "jsonb_build_array",
    "jsonb_build_object",
    "jsonb_typeof",
    "lag",
    "last_value",
    "lead",
    "least",
    "left",
    "length",
    "ln",
    "lower",
    "lpad",
    "ltrim",
    "make_date",
    "max",
    "md5",
    "min",
    "mod",
    "now",
    "nullif",
    "octet_length",
    "overlay",
    "pg_sleep",
    "position",
    "power",
    "rank",
    "regexp_match",
    "regexp_replace",
    "repeat",
    "replace",
    "reverse",
    "right",
    "round",
    "row_number",
    "row_to_json",
    "rpad",
    "rtrim",
    "sign",
    "split_part",
    "sqrt",
    "string_agg",
    "string_to_array",
    "strpos",
    "substr",
    "substring",
    "sum",
    "to_char",
    "to_date",
    "to_json",
    "to_jsonb",
    "to_number",
    "to_timestamp",
    "trim",
    "trunc",
    "unnest",
    "upper",
    "version",
];

/// [`Kind::Read`] only for one statement that is certain to read, by its words.
pub fn classify(sql: &str) -> Kind {
    let Some(tokens) = tokens(sql) else {
        return Kind::Write;
    };
    let statement = match tokens.as_slice() {
        [rest @ .., Token::Symbol(';')] => rest,
        all => all,
    };
    let first = statement
        .iter()
        .find(|token| !matches!(token, Token::Symbol('(')));
    let Some(Token::Word(first)) = first else {
        return Kind::Write;
    };
    // A cursor is there only inside a transaction, which is not one statement.
    let reads = READERS.contains(&first.as_str()) && first != "fetch";
    if reads && statement.iter().all(Token::is_harmless) && calls_are_known(statement) {
        Kind::Read
    } else {
        Kind::Write
    }
}

fn calls_are_known(statement: &[Token]) -> bool {
    statement.windows(2).enumerate().all(|(at, pair)| {
        let [name, Token::Symbol('(')] = pair else {
            return true;
        };
        match name {
            Token::Word(word) => {
                let qualified = at > 0 && statement[at - 1] == Token::Symbol('.');
                !qualified && CALLABLE.contains(&word.as_str())
            }
            Token::Quoted => false,
            Token::Literal | Token::Symbol(_) => true,
        }
    })
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// In lower case.
    Word(String),
    /// A quoted identifier.
    Quoted,
    /// A string, number or parameter.
    Literal,
    Symbol(char),
}

impl Token {
    fn is_harmless(&self) -> bool {
        match self {
            Self::Word(word) => !WRITERS.contains(&word.as_str()),
            Self::Symbol(symbol) => *symbol != ';',
            Self::Quoted | Self::Literal => true,
        }
    }
}

/// `None` for text that is not certain to be read as the server reads it.
fn tokens(sql: &str) -> Option<Vec<Token>> {
    let mut tokens = Vec::new();
    let mut rest = sql;
    loop {
        rest = rest.trim_start();
        let Some(first) = rest.chars().next() else {
            return Some(tokens);
        };
        if let Some(after) = rest.strip_prefix("--") {
            rest = after.split_once('\n').map_or("", |(_, rest)| rest);
        } else if rest.starts_with("/*") {
            rest = after_comment(rest)?;
        } else if first == '\'' {
            rest = after_quote(&rest[1..], '\'')?;
            tokens.push(Token::Literal);
        } else if first == '"' {
            rest = after_quote(&rest[1..], '"')?;
            tokens.push(Token::Quoted);
        } else if first == '$' {
            rest = after_dollar(rest)?;
            tokens.push(Token::Literal);
        } else if is_word(first) {
            let end = rest
                .find(|letter| !is_word(letter) && letter != '$')
                .unwrap_or(rest.len());
            let (word, after) = rest.split_at(end);
            rest = after;
            // Such as E'…' and U&"…", which have escapes of their own.
            if rest.starts_with(['\'', '"']) || rest.starts_with("&'") || rest.starts_with("&\"") {
                return None;
            }
            tokens.push(if first.is_ascii_digit() {
                Token::Literal
            } else {
                Token::Word(word.to_ascii_lowercase())
            });
        } else {
            rest = &rest[first.len_utf8()..];
            tokens.push(Token::Symbol(first));
        }
    }
}

fn is_word(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_' || !letter.is_ascii()
}

/// They nest.
fn after_comment(text: &str) -> Option<&str> {
    let mut depth = 0_usize;
    let mut rest = text;
    loop {
        if let Some(after) = rest.strip_prefix("/*") {
            (depth, rest) = (depth + 1, after);
        } else if let Some(after) = rest.strip_prefix("*/") {
            (depth, rest) = (depth - 1, after);
            if depth == 0 {
                return Some(rest);
            }
        } else {
            rest = &rest[rest.chars().next()?.len_utf8()..];
        }
    }
}

/// A doubled quote is seen as two quoted texts side by side. What a backslash means depends on a setting.
fn after_quote(text: &str, quote: char) -> Option<&str> {
    let (inside, rest) = text.split_once(quote)?;
    (!inside.contains('\\')).then_some(rest)
}

/// After `$1` or `$tag$ … $tag$`.
fn after_dollar(text: &str) -> Option<&str> {
    let name = text.strip_prefix('$')?;
    let end = name.find(|letter| !is_word(letter)).unwrap_or(name.len());
    let (name, rest) = name.split_at(end);
    if name.starts_with(|first: char| first.is_ascii_digit()) {
        return Some(rest);
    }
    let body = rest.strip_prefix('$')?;
    let tag = format!("${name}$");
    body.split_once(&tag).map(|(_, rest)| rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_certain_to_read_is_a_read() {
        for sql in [
            "SELECT 1",
            " select * from items where id = $1 and body like '%it''s%' ;",
            "-- a comment; INSERT\nSELECT 1",
            "/* delete /* nested */ */ TABLE items",
            "VALUES (1), (2)",
            "SHOW server_version",
            "(SELECT 1) UNION (SELECT 2)",
            "WITH a AS MATERIALIZED (SELECT 1 AS x) SELECT count(*) FROM a",
            "EXPLAIN SELECT * FROM items",
            "EXPLAIN (COSTS off, FORMAT json) SELECT 1",
            "SELECT \"update\" FROM \"insert\" i",
            "SELECT $$; DELETE FROM x$$, $a$ $$ $a$",
            "SELECT 'insert into'",
            "SELECT sum(x) OVER (PARTITION BY y) FROM t WHERE z IN (1, 2) AND EXISTS (SELECT 1)",
            "SELECT 1.5::numeric(10, 2), (2 + 3) * (4)",
            "SELECT a.b, pg_sleep(0) FROM a",
            "SELECT $1::text",
            "SELECT $1",
            "SELECT * FROM t LIMIT $10",
        ] {
            assert_eq!(classify(sql), Kind::Read, "{sql}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_taken(text in ".*", sql in "(SELECT|[a-z]+|[$]{1,2}|'|\"|--|/\\*|\\*/|[(); \n]|ä){0,12}") {
            classify(&text);
            // A write stays one whatever a reader puts before or behind it.
            let hidden = format!("{sql} ; DELETE FROM items");
            if classify(&hidden) == Kind::Read {
                // Only as text that the server does not run either.
                proptest::prop_assert!(["'", "\"", "--", "/*", "$"].iter().any(|mark| sql.contains(mark)), "{sql}");
            }
        }
    }

    #[test]
    fn whatever_may_write_is_a_write() {
        for sql in [
            "",
            ";",
            "INSERT INTO t VALUES (1)",
            "UPDATE t SET a = 1",
            "DELETE FROM t",
            "MERGE INTO t USING s ON true WHEN MATCHED THEN DELETE",
            "TRUNCATE t",
            "CREATE TABLE t (a int)",
            "DO $$ BEGIN END $$",
            "CALL p()",
            "COPY t FROM STDIN",
            "SET x = 1",
            "BEGIN",
            "FETCH ALL FROM c",
            "LISTEN x",
            "VACUUM",
            "WITH a AS (INSERT INTO t VALUES (1) RETURNING *) SELECT * FROM a",
            "WITH a AS (dElEtE FROM t RETURNING *) SELECT * FROM a",
            "SELECT * INTO t2 FROM t",
            "SELECT * FROM t FOR UPDATE",
            "SELECT * FROM t FOR SHARE",
            "SELECT * FROM t FOR KEY SHARE",
            "SELECT nextval('s')",
            "SELECT setval('s', 1)",
            "SELECT my_function(1)",
            "SELECT count (*), app . write (1) FROM t",
            "SELECT app.count(1)",
            "SELECT \"count\"(1)",
            "SELECT lo_create(0)",
            "SELECT set_config('a', 'b', false)",
            "SELECT pg_terminate_backend(1)",
            "EXPLAIN ANALYZE SELECT 1",
            "EXPLAIN (ANALYZE) DELETE FROM t",
            "EXPLAIN ANALYSE SELECT 1",
            "SELECT 1; DELETE FROM t",
            "SELECT 1 /* unfinished",
            "SELECT 'unfinished",
            "SELECT 'a\\' || nextval('s') || '",
            "SELECT E'\\'' || nextval('s') --'",
            "SELECT U&'\\0061'",
            "SELECT $a$ unfinished",
            "SELECT $",
            "SELECT $a",
            "SELECT ran\u{212a}(1)",
            "SELECT/**/nextval/**/('s')",
        ] {
            assert_eq!(classify(sql), Kind::Write, "{sql}");
        }
    }
}
